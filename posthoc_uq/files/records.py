"""What a posterior's file holds besides its numbers: one declaration of each record, by which files are written, read,
checked and documented (``docs/format.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, cast

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from posthoc_uq.core.batches import InputRecord
from posthoc_uq.core.errors import CorruptPosteriorError, PosthocUQError
from posthoc_uq.core.options import LARGEST, Count, Kappa, Natural
from posthoc_uq.core.outputs import OutputChoice
from posthoc_uq.core.records import (
    MAX_DEPTH,
    Digest,
    Name,
    Plain,
    Record,
    Sum,
    SumOfSquares,
    among,
    check_plain,
    validate_record,
)
from posthoc_uq.curvature.features import MAX_STAGES, STAGES
from posthoc_uq.files.hdf5 import state_text, state_values
from posthoc_uq.files.match import fingerprint
from posthoc_uq.files.tensors import (
    FEATURES,
    MEAN,
    PRIOR_MEAN,
    PRIOR_PRECISION,
    TensorSlot,
    block_group,
    parameter_shapes,
    slots,
    stored_mean,
)
from posthoc_uq.layers import RULES, Layer, fits
from posthoc_uq.likelihoods import LIKELIHOODS, likelihood_from_attributes, likelihood_to_attributes
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.likelihoods.registry import IN_FILES, class_of
from posthoc_uq.posteriors.block import BLOCKS, FAMILIES, OUTPUTS_ALONE, TensorSpec
from posthoc_uq.posteriors.features import SOURCES, FeatureGrams
from posthoc_uq.posteriors.history import (
    ChangesRecord,
    FaithfulRecord,
    HeadRecord,
    History,
    LeaveOneOut,
    LeftOutRecord,
    ScaleCorrection,
)
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import (
    BY_CLASS,
    HEADS,
    HYPERPARAMETERS,
    NOVELTIES,
    SettingsRecord,
    WeightPrior,
)

Side = Annotated[int, Field(ge=1, le=2**40)]
Colour = Annotated[list[Annotated[float, Field(ge=-LARGEST, le=LARGEST)]], Field(max_length=1024)]


class LayerRecord(Record):
    """A layer: its parameters' names and the sides of its matrices (`posthoc_uq.layers.layer.Layer`).

    Attributes:
        kind: such as linear, conv2d, embedding; matmul has a weight with its inputs first.
        weight: name of the parameter.
        bias: name of the parameter; empty for none.
        groups: G, of a convolution.
        outputs: m, of a group.
        inputs: n, of a group, with the bias.
        weight_shape: of the parameter. Row o, column i of the matrix is ``weight.reshape(G, m, -1)[group, o, i]``; a
            bias is the last column. Of a transposed convolution input and output channels of each group are exchanged
            and the kernel is reversed before.
    """

    kind: Annotated[str, among(RULES)]
    weight: Name
    bias: Name
    groups: Side
    outputs: Side
    inputs: Side
    weight_shape: Annotated[list[Side], Field(max_length=6)]

    @model_validator(mode="after")
    def _check_sides(self) -> LayerRecord:
        shape, inputs = tuple(self.weight_shape), self.inputs - (self.bias != "")
        if not fits(self.kind, shape, self.groups, self.outputs, inputs):
            raise ValueError(
                f"is of kind {self.kind!r} and has a weight of shape {shape}, which is not {self.groups} matrices of "
                f"({self.outputs}, {self.inputs})"
            )
        return self


class NamedLayerRecord(LayerRecord):
    """A layer with its name."""

    name: Name


class BlockRecord(Record):
    """A block: its kind, the layers in it, and the attributes that its class declares in `fields`.

    Attributes:
        kind: see the tensors of blocks.
        members: names of layers. Blocks of several layers hold them one after the other, each flattened.
        attributes: by the kind.
    """

    kind: Annotated[str, among(BLOCKS)]
    members: Annotated[list[Name], Field(min_length=1)]
    attributes: dict[Name, Any]

    @model_validator(mode="after")
    def _check_attributes(self) -> BlockRecord:
        BLOCKS[self.kind].record().model_validate(self.attributes)
        return self


class PriorRecord(Record):
    """The prior of single weights.

    Attributes:
        mean: where it is one number.
        means: whether the file has a mean of every weight.
        precisions: whether it has a precision of every weight.
    """

    mean: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] = 0.0
    means: bool = False
    precisions: bool = False

    @model_validator(mode="after")
    def _check_mean(self) -> PriorRecord:
        if self.means and self.mean:
            raise ValueError("has two means")
        return self


class _GramsRecord(Record):
    """Statistics of what enters a layer.

    Attributes:
        layer: what they enter.
        samples: that were seen.
        smoothing: the ridge on every Gram, as a share of its mean eigenvalue.
        classes: C, of which there are factors.
        width: K, of the basis.
        rank: k, of a class's factors.
        source: of a stage `row`, `mean`, `deviation` or `roughness`, of the last layer `outputs`, `positions` or
            `pooled`: how positions become features. Of a layer's input channels `deviation` has two features each,
            `roughness` three, the others one; and there is one more.
        stages: the same of up to three layers before.
    """

    layer: NamedLayerRecord
    samples: Count
    smoothing: Annotated[float, Field(ge=1e-12, le=1e12)]
    classes: Side
    width: Side
    rank: Natural


class StageRecord(_GramsRecord):
    """The statistics of what enters a layer before the last one."""

    source: Annotated[str, among(STAGES)]


class FeaturesRecord(_GramsRecord):
    """The statistics of the last layer's inputs, and of stages before it (`posthoc_uq.posteriors.features`)."""

    source: Annotated[str, among(SOURCES)]
    stages: Annotated[list[StageRecord], Field(max_length=MAX_STAGES)] = Field(
        default_factory=list[StageRecord]
    )

    @model_validator(mode="after")
    def _check_stages(self) -> FeaturesRecord:
        if any((stage.source == "pixels") != (self.source == "positions") for stage in self.stages):
            raise ValueError("has stages of samples beside features of positions, or the other way round")
        return self


class EvidenceRecord(Record):
    """What the fit saw of the data (`posthoc_uq.posteriors.settings.Evidence`).

    Attributes:
        samples: how many.
        log_likelihood: of the labels; absent without.
        squared_residuals: of a regression, the sum over the noise variance.
        targets: values of a regression.
        noise_power: power of the noise precision to which the Fisher is proportional.
        weight: the sum of the samples' weights; absent where each counts once.
        present: the weighted number of target values that are there; absent where none is missing.
    """

    samples: Count
    log_likelihood: Sum | None = None
    squared_residuals: SumOfSquares
    targets: Natural
    noise_power: Annotated[int, Field(ge=0, le=2)]
    weight: Annotated[float, Field(gt=0, le=1e300)] | None = None
    present: Annotated[float, Field(ge=0, le=1e300)] | None = None


class OwnLikelihoodRecord(Record):
    """A likelihood of the user's: these texts are compared with the object passed to `load`, and never imported.

    Attributes:
        name: of the likelihood.
        class_: as ``module:name``.
        attributes: that the object must have, too.
    """

    name: Annotated[str, Field(max_length=200)]
    class_: Annotated[str, Field(alias="class", pattern=r"^[\w.<>]+:[\w.<>]+$", max_length=1000)]
    attributes: dict[Name, Plain]


def _check_likelihood(values: dict[str, Any]) -> dict[str, Any]:
    if "class" in values:
        OwnLikelihoodRecord.model_validate(values)
        return values
    name = values.get("name")
    kind = class_of(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"has the name {name!r:.60}, which is none of {(*LIKELIHOODS, *IN_FILES)}")
    kind.fields.model_validate({key: value for key, value in values.items() if key != "name"})
    heads: dict[str, dict[str, Any]] = values["heads"] if name in IN_FILES else {}
    if any(head.get("name") in tuple(IN_FILES) for head in heads.values()):
        raise ValueError("has heads in a head")
    for head in heads.values():
        _check_likelihood(head)
    if any("class" in head for head in heads.values()):
        return values
    try:
        likelihood_from_attributes(values)
    except PosthocUQError as error:
        raise ValueError(f"cannot be: {str(error).rstrip('.')}") from None
    return values


LikelihoodRecord = Annotated[dict[Name, Any], AfterValidator(_check_likelihood)]


class FitFacts(Record):
    """Those facts about a fit that are read again; all others are kept for people.

    Attributes:
        model: its name, of `posthoc-uq fit`.
        model_weights: the file of its weights.
        model_weights_prefix: before the model's names in it.
        model_classes: outputs of the model.
        images: how they are prepared, in words.
        image_size: in pixels.
        image_mean: of the channels.
        image_std: of the channels.
        class_names: of the outputs.
        table_columns: that are inputs.
        table_classes: labels of a table, in the order of the outputs.
        last_layer: its name.
        novelty: by what it is measured.
        prior_body_variance: what the prior of the layers before the last one adds to a faithful posterior.
        kappa: of the unscented transform in training, one number or one by layer.
    """

    model_config = ConfigDict(extra="ignore", alias_generator=lambda name: name.replace("_", " "))

    model: Name = ""
    model_weights: Name = ""
    model_weights_prefix: Name = ""
    model_classes: Annotated[int, Field(ge=1, le=100_000)] = 1  # a stranger's file shall not fill the memory
    images: Name = ""
    image_size: Annotated[int, Field(ge=1, le=2**14)] = 1
    image_mean: Colour = Field(default_factory=list[float])
    image_std: Colour = Field(default_factory=list[float])
    class_names: list[Name] = Field(default_factory=list[str])
    table_columns: list[Name] = Field(default_factory=list[str])
    table_classes: list[Name] = Field(default_factory=list[str])
    last_layer: Name = ""
    novelty: Name = ""
    prior_body_variance: Annotated[float, Field(ge=0, le=LARGEST)] = 0.0
    kappa: Kappa | dict[Name, Kappa] = 2.0


def _check_fit(values: dict[str, Any]) -> dict[str, Any]:
    FitFacts.model_validate(values)
    # the losses of a training may be infinite
    return check_plain(values, finite=False, depth=MAX_DEPTH + 1)


_MAX_AMOUNTS = {"n_samples": 10_000, "n_draws": 100_000, "n_probes": 10_000, "memory_budget": 2**40}
"""Of a head's options those that decide how much memory a prediction takes: a file may not ask for more."""


def check_amounts(values: dict[str, Any]) -> dict[str, Any]:
    """Options of a head, unless a prediction with them would take too much memory; a ValueError says so."""
    for name, limit in _MAX_AMOUNTS.items():
        value = values.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= limit):
            raise ValueError(f"has {name} {value!r:.60}, which is no whole number from 1 to {limit}")
    return values


def _check_options(record: HeadRecord) -> HeadRecord:
    check_amounts(record.options)
    return record


def _check_promises(promises: ConformalScores) -> ConformalScores:
    if promises.head.get("head") not in HEADS:
        raise ValueError(f"has a head that is none of {HEADS}")
    check_amounts(promises.head)
    SettingsRecord.model_validate(promises.posterior)
    SettingsRecord.model_validate(promises.valid_at)
    return promises


def _check_left_out(found: LeaveOneOut) -> LeaveOneOut:
    of_classes = (found.accuracy is None, found.temperature is None)
    of_regression = (found.noise_variance is None, found.noise_scale is None)
    if {of_classes, of_regression} != {(True, True), (False, False)}:
        raise ValueError("must have accuracy and temperature, or noise_variance and noise_scale")
    if found.rows > found.samples:
        raise ValueError(f"has left out {found.rows} of {found.samples} samples")
    return found


_MAX_INPUTS = 64


def _check_places(inputs: dict[str, InputRecord]) -> dict[str, InputRecord]:
    places = [one.place for one in inputs.values() if one.place is not None]
    if len(set(places)) < len(places):
        raise ValueError("has two inputs at one place")
    if any(place >= _MAX_INPUTS for place in places):
        raise ValueError(f"has a place of {_MAX_INPUTS} or more")
    return inputs


class HistoryRecord(Record):
    """How the posterior was fitted, tuned and calibrated (`posthoc_uq.posteriors.history.History`).

    Attributes:
        fit: options, seed, timings; for people but for `FitFacts`.
        deterministic: parameters without a posterior, and why.
        tuning: how each hyperparameter was chosen.
        head: that predicts.
        faithful: the prior whose predictions are the model's own within a budget.
        left_out: where held-out labels begin to search.
        leave_one_out: what it estimated and set. Absent in older files, of which `calibrate` tunes a regression by half
            of the rows.
        calibration: of the moments head.
        promises: the held-out scores.
        novelty: ``posterior`` where no layer was found to measure it by.
        changes: data since the fit.
        output: which part of what the model returns its outputs are.
        inputs: of the fit's first batch, by the names of the model's arguments.
    """

    fit: Annotated[dict[Name, Any], AfterValidator(_check_fit)]
    deterministic: dict[Name, Name]
    tuning: dict[Name, Name]
    head: Annotated[HeadRecord, AfterValidator(_check_options)] | None = None
    faithful: FaithfulRecord | None = None
    left_out: LeftOutRecord | None = None
    leave_one_out: Annotated[LeaveOneOut, AfterValidator(_check_left_out)] | None = None
    calibration: ScaleCorrection | None = None
    promises: Annotated[ConformalScores, AfterValidator(_check_promises)] | None = None
    novelty: Annotated[str, among(NOVELTIES)] = ""
    changes: ChangesRecord | None = None
    output: OutputChoice | None = None
    inputs: (
        Annotated[dict[Name, InputRecord], Field(max_length=_MAX_INPUTS), AfterValidator(_check_places)]
        | None
    ) = None

    @model_validator(mode="before")
    @classmethod
    def _without_thresholds(cls, values: Any) -> Any:
        """Files of earlier versions may hold thresholds for referral, which promises have replaced."""
        if isinstance(values, dict):
            return {
                name: value for name, value in cast("dict[Any, Any]", values).items() if name != "referral"
            }
        return values

    def history(self) -> History:
        """The history of a posterior."""
        return History(**{name: value for name, value in self if value is not None})


def _plain_history(history: History) -> dict[str, Any]:
    required = ("fit", "deterministic", "tuning")
    values: dict[str, Any] = {
        name: value
        for name, value in vars(history).items()
        if name in HistoryRecord.model_fields and (value not in ({}, "", None) or name in required)
    }
    return HistoryRecord.model_construct(**values).plain()


class Description(Record):
    """All that a file holds besides numbers: the JSON text of its dataset ``state``.

    Attributes:
        fingerprint: of the parameters with a posterior, or trained without uncertainty.
        buffers_fingerprint: of the model's floating-point buffers; absent without.
        others_fingerprint: of all other floating-point parameters; absent without.
        method: its name, as in the header; ``outputs`` of calibrated outputs, which have no layers and blocks.
        settings: hyperparameters.
        likelihood: its name and what it declares.
        evidence: of the fit.
        history: how it was fitted, tuned and calibrated.
        layers: by name.
        blocks: by name; a block of one layer has the layer's name.
        trained_mean: names of the parameters whose trained mean replaces the model's own.
        certain: shapes, by name, of parameters that were trained without uncertainty.
        prior: of single weights.
        features: statistics of the last layer's inputs, where the fit kept them.
    """

    fingerprint: Digest
    buffers_fingerprint: Digest | None = None
    others_fingerprint: Digest | None = None
    method: Annotated[str, among(FAMILIES)]
    settings: SettingsRecord
    likelihood: LikelihoodRecord
    evidence: EvidenceRecord
    history: HistoryRecord
    layers: dict[Name, LayerRecord]
    blocks: dict[Name, BlockRecord]
    trained_mean: list[Name]
    certain: dict[Name, Annotated[list[Natural], Field(max_length=8)]]
    prior: PriorRecord
    features: FeaturesRecord | None = None

    def layers_by_name(self) -> dict[str, Layer]:
        """The layers as objects."""
        return {name: Layer.from_attributes(name, layer.model_dump()) for name, layer in self.layers.items()}

    @model_validator(mode="after")
    def _check_settings(self) -> Description:
        missing = sorted(HYPERPARAMETERS.keys() - self.settings.given - set(BY_CLASS))
        if missing:
            raise ValueError(f"has no '{missing[0]}' in its settings")
        faithful = self.history.faithful
        for name, value in (
            ("prior_precision", self.settings.prior_precision),
            ("faithful prior", None if faithful is None else faithful.value),
        ):
            if isinstance(value, dict) and value.keys() != self.layers.keys():
                raise ValueError(f"has a {name} that does not name every layer once")
        return self

    @model_validator(mode="after")
    def _check_blocks(self) -> Description:
        """What is said of layers, blocks, means and priors must be what the method gives."""
        weights = [layer.weight for layer in self.layers.values()]
        if len(set(weights)) < len(weights):
            raise ValueError("has two layers with the same weight")
        kinds = {block.kind for block in self.blocks.values()}
        # large embeddings have a diagonal beside the others' factors, and wide layers keep leading directions alone
        narrow = {kind.removesuffix("_wide") for kind in kinds}
        alone = self.method == OUTPUTS_ALONE
        if alone != (not kinds) or alone != (not self.layers):
            raise ValueError("must have layers and blocks, unless it is of outputs alone")
        if len(narrow - {"diagonal"}) > 1 or not kinds <= set(FAMILIES[self.method]):
            raise ValueError(f"has the method {self.method!r}, and blocks of the kinds {sorted(kinds)}")
        classes, samples = [BLOCKS[kind] for kind in sorted(kinds)], self.evidence.samples
        if any(block.attributes.get("samples", samples) != samples for block in self.blocks.values()):
            raise ValueError("has variances of another number of samples than the fit saw")
        changes = self.history.changes
        moved = changes is not None and changes.moved > 0
        if self.trained_mean and not moved and not all(kind.trained for kind in classes):
            raise ValueError(f"has a trained mean, which method={self.method!r} does not give")
        if self.prior != PriorRecord() and not all("prior_precision" in kind.tunable for kind in classes):
            raise ValueError("has a prior of single weights, and its blocks have no prior")
        if self.prior.precisions and not all(kind.per_weight_prior for kind in classes):
            raise ValueError("has prior precisions of single weights, which its blocks cannot have")
        return self

    @model_validator(mode="after")
    def _check_outputs(self) -> Description:
        """The likelihood must fit the number of outputs, where that is known: from the targets of the fit, or from the
        last layer if its outputs are the model's.
        """
        evidence, outputs, classes = self.evidence, self._outputs_of_last(), None
        weight = evidence.samples if evidence.weight is None else evidence.weight
        if (evidence.present or 0.0) > evidence.targets * weight / evidence.samples * (1 + 1e-9):
            raise ValueError(
                f"has {evidence.present:g} targets that are there, of {evidence.targets} at most"
            )
        heads: dict[str, Any] = self.likelihood.get("heads", {}) if "class" not in self.likelihood else {}
        if "class" in self.likelihood or any("class" in head for head in heads.values()):
            return self  # a user's likelihood, of which the file has too little
        likelihood = likelihood_from_attributes(self.likelihood)
        if likelihood.noise_variance is None and (evidence.targets or evidence.squared_residuals):
            raise ValueError(f"has the likelihood {likelihood.name!r}, and the evidence of a regression")
        if evidence.targets:
            targets_per_sample, remainder = divmod(evidence.targets, evidence.samples)
            several = self.features is not None and self.features.source == "positions"
            known = targets_per_sample if outputs is None else outputs
            if remainder or (targets_per_sample % known if several else targets_per_sample != known):
                raise ValueError(
                    f"has evidence of {evidence.targets} targets of {evidence.samples} samples, which is no number of "
                    f"its outputs"
                )
            outputs = targets_per_sample
        found = self.history.leave_one_out
        if found is not None:
            known = likelihood.noise_variance
            if found.noise_variance is None and not likelihood.logits:
                raise ValueError(f"has the likelihood {likelihood.name!r}, and an accuracy by leave-one-out")
            if found.noise_variance is not None and (
                known is None or len(known) != len(found.noise_variance)
            ):
                raise ValueError("has a noise by leave-one-out of other outputs than its likelihood's")
        if outputs is not None:
            if not likelihood.accepts_output_count(outputs):
                raise ValueError(
                    f"has the likelihood {likelihood.name!r}, which contradicts its {outputs} outputs"
                )
            classes = likelihood.classes(outputs)
        for name in BY_CLASS:
            numbers = len(getattr(self.settings, name))
            if numbers and (not likelihood.class_logits or outputs not in (None, numbers)):
                raise ValueError(f"has a {name} of {numbers} numbers, which its outputs contradict")
        grams = [] if self.features is None else [self.features, *self.features.stages]
        if classes is not None and any(each.classes > classes for each in grams):
            raise ValueError(f"has features of more classes than the {classes} that there are")
        return self

    def _outputs_of_last(self) -> int | None:
        if self.features is None:
            return None
        last = self.features.layer
        for layer in (last, *(stage.layer for stage in self.features.stages)):
            known = self.layers.get(layer.name)
            if known is not None and known.model_dump() != layer.model_dump(exclude={"name"}):
                raise ValueError(f"has features of a layer '{layer.name}' that is another one")
        return last.groups * last.outputs if self.features.source != "pooled" else None


def description_of(posterior: Posterior) -> Description:
    """The description of this posterior for a file, checked as `load` will check it.

    Raises:
        CorruptPosteriorError: a value is out of range, or contradicts another.
        PosthocUQError: an attribute of the likelihood is no plain value.
        TypeError, ValueError: JSON cannot hold a value, or the whole is too long.
    """
    covered = {name for layer in posterior.layers.values() for name in layer.parameter_names}
    values = {
        # by the one of the fit, the model may be written to from now on
        "fingerprint": posterior.fingerprint or fingerprint(posterior.original),
        "buffers_fingerprint": posterior.buffers_fingerprint,
        "others_fingerprint": posterior.others_fingerprint,
        "method": posterior.method,
        "settings": posterior.settings.plain(),
        "likelihood": likelihood_to_attributes(posterior.likelihood),
        "evidence": asdict(posterior.evidence),
        "history": _plain_history(posterior.history),
        "layers": {name: layer.attributes() for name, layer in posterior.layers.items()},
        "blocks": {
            name: {"kind": block.kind, "members": posterior.members[name], "attributes": block.attributes()}
            for name, block in posterior.blocks.items()
        },
        "trained_mean": list(stored_mean(posterior)),
        "certain": {
            n: list(tensor.shape) for n, tensor in posterior.trained_mean.items() if n not in covered
        },
        "prior": _plain_prior(posterior.weight_prior),
        "features": None if posterior.features is None else posterior.features.attributes(),
    }
    return parsed(state_text(values))


def parsed(text: bytes) -> Description:
    """The description that a file holds.

    Raises:
        CorruptPosteriorError: a field is missing, unknown, of another type or out of range, or contradicts another.
        FormatError: the text is no JSON object.
    """
    return validate_record(Description, state_values(text), "its description")


def _plain_prior(prior: WeightPrior) -> dict[str, Any]:
    by_weight = isinstance(prior.mean, Mapping)
    mean: dict[str, Any] = {"means": True} if by_weight else {"mean": prior.mean} if prior.mean else {}
    return mean | ({"precisions": True} if prior.precision else {})


def described_slots(description: Description) -> list[TensorSlot]:
    """Every tensor that a file of this description must have; needs no tensor, so a file is checked before its numbers
    are read.

    Raises:
        CorruptPosteriorError: blocks, trained mean or prior do not fit the layers.
    """
    layers = description.layers_by_name()
    found: list[TensorSlot] = []
    held: list[str] = []
    for name, block in description.blocks.items():
        kind, members = BLOCKS[block.kind], block.members
        if any(member not in layers for member in members):
            raise CorruptPosteriorError(f"block '{name}' has layers that are not described: {members[:5]}")
        if kind.joint:
            shape = (1, 1, sum(layers[member].parameters for member in members))
        elif members == [name]:
            shape = layers[name].matrix_shape
        else:
            raise CorruptPosteriorError(
                f"block '{name}' must hold the layer of that name alone, not {members[:5]}"
            )
        held += members
        owner = f"block '{name}'"
        found += slots(block_group(name), owner, _specs(owner, kind.specs, shape, block.attributes))
    if sorted(held) != sorted(layers):
        raise CorruptPosteriorError("its blocks do not hold every layer once")
    shapes = parameter_shapes(layers.values())
    of_layers = {name: TensorSpec(shape) for name, shape in shapes.items()}
    certain = {name: TensorSpec(tuple(shape)) for name, shape in description.certain.items()}
    if certain.keys() & shapes.keys() or not certain.keys() <= set(description.trained_mean):
        raise CorruptPosteriorError("its certain parameters must be of the trained mean and of no layer")
    stray = [name for name in description.trained_mean if name not in shapes and name not in certain]
    if stray:
        raise CorruptPosteriorError(f"its trained mean has parameters that no layer has: {stray[:5]}")
    mean = {name: (of_layers | certain)[name] for name in description.trained_mean}
    found += slots(MEAN, "the trained mean", mean)
    for group, given in (
        (PRIOR_MEAN, description.prior.means),
        (PRIOR_PRECISION, description.prior.precisions),
    ):
        found += slots(group, "the prior", of_layers if given else {})
    if description.features is not None:
        owner = "the features"
        found += slots(FEATURES, owner, _specs(owner, FeatureGrams.specs, description.features.plain()))
    return found


def _specs(owner: str, specs: Callable[..., dict[str, TensorSpec]], *values: Any) -> dict[str, TensorSpec]:
    try:
        return specs(*values)
    except CorruptPosteriorError as error:
        raise CorruptPosteriorError(f"{owner}: {error}") from None
