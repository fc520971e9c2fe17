"""`Posterior`: a distribution over the weights of some layers, as blocks, with its hyperparameters and its prior.

What the prior precision means for every weight stands here: `Posterior.prior_precision` is the number, or one a layer;
`WeightPrior` has factors of single weights; `Posterior.block_settings` hands their product to a block, whose
`covariance` adds it to the Fisher information; `Posterior.occam_factor` has its terms in the marginal likelihood.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, log, pi
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import BatchReader, batches_of_call, count_samples
from posthoc_uq.core.devices import KEPT_BYTES, as_double, has_double, host_double
from posthoc_uq.core.errors import PosteriorMismatchError, PosthocUQError, warn_user
from posthoc_uq.core.model import fingerprint, replicate
from posthoc_uq.core.options import Count, Magnitude, check_option, did_you_mean, shown
from posthoc_uq.core.randomness import mixed_seeds
from posthoc_uq.core.records import Record
from posthoc_uq.core.registry import shown_names
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.proof import Proof
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.posteriors import block as can
from posthoc_uq.posteriors.block import Block, PrecisionSettings
from posthoc_uq.posteriors.covariance import DRAW_GROUP, Covariance
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.history import History
from posthoc_uq.posteriors.laplace import LARGEST_BYTES, MeanFieldBlock
from posthoc_uq.posteriors.settings import (
    BY_CLASS,
    HYPERPARAMETERS,
    ONE_PRIOR,
    Evidence,
    Hyperparameters,
    LayerPriors,
    WeightPrior,
    layer_matrix,
    same_settings,
)

if TYPE_CHECKING:
    from posthoc_uq.posteriors.report import Report

Value = TypeVar("Value")
Self = TypeVar("Self", bound="Posterior")


class BlockLayout:
    """Converts between the matrices of blocks and those of layers, all ``(groups, outputs, inputs)``.

    Args:
        layers: by name.
        members: block name to the names of its layers; a block of one layer has its name.
    """

    def __init__(self, layers: Mapping[str, Layer], members: Mapping[str, list[str]]) -> None:
        self._layers, self._members = layers, members

    def shape(self, block: str) -> tuple[int, int, int]:
        """The shape of a block's matrix."""
        if block in self._layers:
            return self._layers[block].matrix_shape
        return 1, 1, sum(self._layers[name].parameters for name in self._members[block])

    def home(self, layer: str) -> tuple[str, int]:
        """The block of a layer, and where the layer starts in it.

        Raises:
            PosthocUQError: there is no such layer.
        """
        if layer in self._layers and layer in self._members:
            return layer, 0
        for block, inner in self._members.items():
            if layer in inner:
                return block, sum(self._layers[name].parameters for name in inner[: inner.index(layer)])
        raise PosthocUQError(f"The posterior has no layer '{layer}'; it has {list(self._layers)[:8]}.")

    def split(self, block: str, matrix: Tensor) -> Iterator[tuple[Layer, Tensor]]:
        """A block's matrix ``(*lead, G, m, n)`` as its layers' matrices."""
        if block in self._layers:
            yield self._layers[block], matrix
            return
        start = 0
        for name in self._members[block]:
            layer = self._layers[name]
            part = matrix[..., 0, 0, start : start + layer.parameters]
            start += layer.parameters
            yield layer, part.reshape(*matrix.shape[:-3], *layer.matrix_shape)

    def join(self, block: str, matrices: Mapping[str, Tensor]) -> Tensor:
        """Layers' matrices ``(q, G, m, n)`` as the block's; absent layers are zero."""
        if block in self._layers:
            return matrices[block]
        like = next(iter(matrices.values()))
        parts = [
            matrices[name].flatten(1)
            if name in matrices
            else like.new_zeros(like.shape[0], self._layers[name].parameters)
            for name in self._members[block]
        ]
        return torch.cat(parts, dim=1).reshape(like.shape[0], 1, 1, -1)


COVARIANCE_BYTES = 16 * 2**20  # the most that all kept covariances of a posterior take


class Cache(Generic[Value]):
    """Values by name, while memory allows; safe for several threads. A copy of it begins empty.

    Args:
        most: bytes that all values may take.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[str, tuple[Value, int]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), (self._most,)

    def get(self, name: str) -> Value | None:
        """The value of the name, if there is one."""
        with self._lock:
            entry = self._entries.get(name)
        return None if entry is None else entry[0]

    def put(self, name: str, value: Value, size: int) -> None:
        """Keep a value of so many bytes, where there is room."""
        with self._lock:
            if size + sum(other for _, other in self._entries.values()) <= self._most:
                self._entries[name] = value, size


_DRAWN_NUMBERS = 2**18  # of draws that are written into the result together


def _bytes_beyond(covariance: Covariance, block: Block) -> int:
    """Memory that a covariance holds beyond its block."""
    stored = {tensor.data_ptr() for tensor in block.tensors().values()}
    values = vars(covariance).values()
    own = [value for value in values if isinstance(value, Tensor) and value.data_ptr() not in stored]
    inner = [_bytes_beyond(value, block) for value in values if isinstance(value, Covariance)]
    return sum(tensor.nbytes for tensor in own) + sum(inner) + covariance.computed_bytes


class _Hyperparameter(Generic[Value]):
    """One hyperparameter as an attribute of a posterior."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, posterior: Posterior, owner: type | None = None) -> Value:
        return getattr(posterior.settings, self._name)


_FUNCTIONS = {
    "tune": "posterior = uq.tune(posterior, val_loader)",
    "calibrate": "posterior = uq.calibrate(posterior, val_loader)",
    "update": "posterior = uq.update(posterior, loader)",
    "optimize_prior_precision": "posterior = uq.tune(posterior, val_loader)",
    "save": "uq.save(posterior, path)",
    "predict": "uq.wrap(model, posterior)(inputs)",
}
"""The call in place of a method that users of other libraries look for."""
_TUNE = "tune on held-out data: posterior = uq.tune(posterior, val_loader)"


class Posterior:
    """A distribution over the weights of some layers, independent between blocks; as a rule ``N(mean, P^-1)``.

    ``P = scale / noise_scale * I + prior_precision`` per block (the square of `noise_scale` for the empirical
    Fisher), with the Fisher information ``I`` in the form of the method.

    A posterior is a value: nothing writes into one. `with_settings` gives one with other hyperparameters, which never
    needs the data again; `tunable` names those that it can change. `posthoc_uq.tune`, `posthoc_uq.calibrate` and
    `posthoc_uq.update` return another one, too.

    A method that optimises the variances themselves has its prior and its noise in what it optimises. There
    `prior_precision` says which prior that was and cannot be changed, and only `scale`, where there is one, enters the
    variances, as ``samples / scale``. Blocks that are not Gaussian can at least draw.

    Attributes:
        method: the name of the method that fitted it.
        layers: the layers by name.
        blocks: block name to `Block`; a block has the name of its layer, except in the dense posterior.
        members: block name to the names of its layers.
        layout: where the layers are in the blocks.
        original: the model's own parameters by name, a view of them: of the layers, and those of `trained_mean`.
        trained_mean: trained parameters by name, which replace the model's own; some may be of no layer, and certain.
        mean: the parameters that the Gaussian is centred on: those of `trained_mean`, and else of `original`.
        likelihood: of the targets given the outputs, as in the fit; `observation` is at the present noise scale.
        model: the model it was fitted on or loaded for; no part of the state.
        proof: of how that model uses the layers, from the fit; no part of the state.
        features: statistics of the last layer's inputs in training, for novelty; None where the fit took none.
        weight_prior: the prior of single weights, a factor on `prior_precision` and a mean; as given to the fit.
        capabilities: what all of its blocks can do, by the names in `posthoc_uq.posteriors.block`; without any it is of
            outputs alone, `posthoc_uq.calibrate_outputs`.
        settings: all hyperparameters as one value.
        tunable: names of the hyperparameters that have a meaning here and may be changed.
        fixed_by_training: names of those that the training optimised: they are known, and cannot be changed.
        fingerprint: digest of `original` at the fit; that is the model's own memory, which later training changes.
        buffers_fingerprint: digest of the model's buffers at the fit (`model.statistics_of`); None where
            it has none.
        others_fingerprint: digest of the model's other parameters at the fit; None where there are none. `load` alone
            looks at it.

    Example:
        ```python
        wider = posterior.with_settings(prior_precision=0.1)
        weights = wider.sample(3, torch.Generator().manual_seed(0))
        print({name: drawn.shape for name, drawn in weights.items()})
        print(posterior.report())
        ```
    """

    _covariances: Cache[Covariance]  # by block
    _variances: Cache[Tensor]  # by block
    _of_layers: Cache[Covariance]  # by layer
    _density: Cache[tuple[dict[str, Covariance], Tensor]]  # of all blocks together
    _copied_mean: dict[str, Tensor] | None

    _hidden: ClassVar[tuple[str, ...]] = (  # from `dir`: what the package alone calls
        *("at", "block_settings", "covariance", "covariances", "draw_seeds", "layout", "members", "noted"),
        *("occam_factor", "of_layer", "original", "proof", "replaced", "reported", "require", "sample_from"),
        *("training_precisions", "warn_if_void", "with_blocks", "without_data"),
        *("buffers_fingerprint", "fingerprint", "others_fingerprint", "fixed_by_training"),
    )

    scale = _Hyperparameter[float]()
    """What the mean Fisher is multiplied with; starts at the number of samples."""
    prior_precision = _Hyperparameter[float | dict[str, float]]()
    """A number, or one number per layer name."""
    residual_weight = _Hyperparameter[float]()
    """Omega in [0, 1], the weight of INF's diagonal residual."""
    noise_scale = _Hyperparameter[float]()
    """Factor on the noise variance, or the dispersion, of the likelihood (regression)."""
    temperature = _Hyperparameter[float]()
    """Divides the logits in prediction (classification)."""
    class_shift = _Hyperparameter[tuple[float, ...]]()
    """A number for each class or label, which is added to its logit after the temperature; empty for none."""
    class_scale = _Hyperparameter[tuple[float, ...]]()
    """A number for each class or label, by which its logit is multiplied; empty for none."""

    def __init__(
        self,
        method: str,
        layers: Mapping[str, Layer],
        blocks: Mapping[str, Block],
        members: Mapping[str, list[str]],
        mean: Mapping[str, Tensor],
        likelihood: Likelihood,
        evidence: Evidence,
        history: History | None = None,
        *,
        trained_mean: Mapping[str, Tensor] | None = None,
        settings: Hyperparameters | None = None,
        model: nn.Module | None = None,
        proof: Proof | None = None,
        features: FeatureGrams | None = None,
        weight_prior: WeightPrior | None = None,
        fingerprint: str | None = None,
        buffers_fingerprint: str | None = None,
        others_fingerprint: str | None = None,
    ) -> None:
        self.method = method
        self.layers = dict(layers)
        self.blocks = dict(blocks)
        self.members = {name: list(inner) for name, inner in members.items()}
        self.original = {name: mean[name] for layer in self.layers.values() for name in layer.parameter_names}
        self.original |= {name: mean[name] for name in trained_mean or {}}
        self.layout = BlockLayout(self.layers, self.members)
        self.trained_mean = dict(trained_mean or {})
        for name, block in self.blocks.items():
            stored = block.stored_mean()  # of blocks that keep what their weights are on average
            for layer, matrix in [] if stored is None else self.layout.split(name, stored):
                for parameter, tensor in layer.to_parameters(matrix).items():
                    self.trained_mean[parameter] = tensor.to(self.original[parameter])
        self.mean = {
            name: self.trained_mean.get(name, parameter) for name, parameter in self.original.items()
        }
        self.likelihood = likelihood
        self.evidence = evidence
        self.history = history or History()
        self.model, self.proof, self.features = model, proof, features
        self.weight_prior = weight_prior or WeightPrior()
        self.fingerprint, self.buffers_fingerprint = fingerprint, buffers_fingerprint
        self.others_fingerprint = others_fingerprint
        by_block = [type(block).capabilities() for block in self.blocks.values()]
        self.capabilities = by_block[0].intersection(*by_block) if by_block else frozenset({can.GIVEN})
        outputs = {"noise_scale"} if likelihood.has_noise else set[str]()
        outputs |= {"temperature"} if likelihood.logits else set()
        outputs |= set(BY_CLASS) if likelihood.class_logits else set()
        self.tunable = frozenset(outputs).union(*(block.tunable for block in self.blocks.values()))
        self.fixed_by_training = frozenset[str]().union(
            *(block.fixed_by_training for block in self.blocks.values())
        )
        first = vars(
            settings or Hyperparameters(evidence.total)
        )  # including those that cannot be changed later
        self.settings = Hyperparameters(**{name: self._valid(name, value) for name, value in first.items()})
        self._clear_caches()
        self._copied_mean = None
        self._is_made = True

    def __dir__(self) -> list[str]:
        """What users read and call."""
        return shown_names(self, Posterior)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refused once it is made."""
        if "_is_made" not in vars(self):
            super().__setattr__(name, value)
            return
        shown_value = value if isinstance(value, (int, float)) else "..."
        way_out = (
            f"posterior = posterior.with_settings({name}={shown_value})"
            if name in HYPERPARAMETERS
            else "with_settings, uq.tune, uq.calibrate and uq.update return another one"
        )
        raise AttributeError(f"A posterior is a value, whose {name} cannot be set: {way_out}.")

    def __getattr__(self, name: str) -> Any:
        """What other libraries have as a method is a function of this one."""
        way_out = _FUNCTIONS.get(name)
        if way_out is None:
            raise AttributeError(f"A posterior has no {name!r}; dir(posterior) lists what it has.")
        raise AttributeError(f"A posterior has no method {name!r}: {way_out}.")

    def __delattr__(self, name: str) -> None:
        """Refused."""
        raise AttributeError(f"A posterior is a value, whose {name} cannot be deleted.")

    def __repr__(self) -> str:
        count = sum(layer.parameters for layer in self.layers.values())
        return (
            f"Posterior(method={self.method!r}, layers={len(self.layers)}, parameters={count}, "
            f"scale={self.scale:g}, prior_precision={self.prior_precision})"
        )

    def with_blocks(
        self,
        blocks: Mapping[str, Block],
        *,
        evidence: Evidence | None = None,
        history: History | None = None,
        settings: Hyperparameters | None = None,
        trained_mean: Mapping[str, Tensor] | None = None,
    ) -> Posterior:
        """A posterior of the same layers, weights and prior with other blocks; what is not given is that of this one,
        but for statistics of the data (`features`), which belong to its blocks.
        """
        return Posterior(
            self.method,
            self.layers,
            blocks,
            self.members,
            self.original,
            self.likelihood,
            evidence or self.evidence,
            history or self.history,
            trained_mean=trained_mean or self.trained_mean,
            settings=settings or self.settings,
            model=self.model,
            proof=self.proof,
            weight_prior=self.weight_prior,
            fingerprint=self.fingerprint,
            buffers_fingerprint=self.buffers_fingerprint,
            others_fingerprint=self.others_fingerprint,
        )

    def replaced(self: Self, **attributes: Any) -> Self:
        """This posterior with other values of some attributes, on which no others depend: its model, history, features,
        prior of single weights, fingerprints, blocks of the same kinds.
        """
        new = object.__new__(type(self))
        vars(new).update(vars(self) | attributes)
        if not attributes.keys().isdisjoint(("weight_prior", "blocks")):
            new._clear_caches()
        return new

    def noted(self: Self, **records: Mapping[str, Any] | Record | None) -> Self:
        """This posterior with more in the records of its history; see `History.noted`."""
        return self.replaced(history=self.history.noted(**records))

    def with_settings(
        self: Self,
        *,
        scale: float | None = None,
        prior_precision: float | Tensor | Sequence[float] | Mapping[str, float | Tensor] | None = None,
        residual_weight: float | None = None,
        noise_scale: float | None = None,
        temperature: float | None = None,
        class_shift: Sequence[float] | Tensor | None = None,
        class_scale: Sequence[float] | Tensor | None = None,
    ) -> Self:
        """This posterior with other hyperparameters; those that are not given stay. Warns if promises no longer hold.

        Args:
            scale: what the mean Fisher is multiplied with.
            prior_precision: a number; one for each layer, by its name or as a vector in the order of `layers`; or, for
                ``"diag"``, ``"full"``, ``"subnetwork"`` and ``"inf"``, one for each weight: tensors by the names of
                all parameters, or a vector in the order of `parameter_names`. `prior_precision` is then 1, a factor on
                them, as are numbers that are given later.
            residual_weight: omega in [0, 1], the weight of INF's diagonal residual.
            noise_scale: factor on the noise variance, or the dispersion, of the likelihood (regression).
            temperature: divides the logits in prediction (classification).
            class_shift: a number for each class or label, one for a single logit: added to the logits after the
                temperature. ``log(rate / rate of the training)`` of every class moves predictions to other class rates.
                ``()`` for none.
            class_scale: the same, by which logits are multiplied; ``()`` for none.

        Raises:
            PosthocUQError: a value is out of range, or differs from the present one and cannot be changed here.
        """
        weight_prior = None
        if prior_precision is not None and not isinstance(prior_precision, (int, float)):
            from posthoc_uq.posteriors.weight_prior import read_precisions

            means = {name: self.mean[name] for name in self.parameter_names}
            found = read_precisions(prior_precision, self.layers, means, self.blocks.values())
            if isinstance(found, WeightPrior):
                weight_prior, found = replace(self.weight_prior, precision=found.precision), 1.0
            prior_precision = found
        asked = {
            "scale": scale,
            "prior_precision": prior_precision,
            "residual_weight": residual_weight,
            "noise_scale": noise_scale,
            "temperature": temperature,
            "class_shift": class_shift,
            "class_scale": class_scale,
        }
        known = self if weight_prior is None else self._of_weight_prior(weight_prior)
        new = known.at(
            replace(self.settings, **{key: value for key, value in asked.items() if value is not None})
        )
        changed = {name for name in asked if getattr(new, name) != getattr(self, name)}
        changed |= set[str]() if weight_prior is None else {"prior_precision"}
        if changed:  # what a search tried and chose is no longer what the posterior has
            labels = {name: HYPERPARAMETERS[name].label for name in changed}
            if self.noise_variance is not None and "noise_scale" in changed:
                labels["noise_scale"] = "noise variance"
            history = replace(new.history.noted(tuning=dict.fromkeys(labels.values(), "given")), trials=None)
            if changed & {"temperature", "noise_scale", *BY_CLASS}:
                history = replace(history, left_out=None, leave_one_out=None)
            new = new.replaced(history=history)
        new.warn_if_void(self)
        return new

    def _of_weight_prior(self: Self, prior: WeightPrior) -> Self:
        """This posterior with another prior of single weights, without what was found under the one before."""
        if self.keeps_promises:
            self._warn_of_void()
        note = {"prior of each weight": "given, times the prior precision"}
        history = replace(self.history.noted(fit=note), promises=None, faithful=None)
        return self.replaced(weight_prior=prior, history=history)

    def at(self: Self, settings: Hyperparameters) -> Self:
        """This posterior at these settings, for searches: nobody chose them, so that nothing is recorded.

        Raises:
            PosthocUQError: a value is out of range, or differs from the present one and cannot be changed here.
        """
        checked = {name: self._checked(name, value) for name, value in vars(settings).items()}
        new = self.replaced(settings=Hyperparameters(**checked))
        if new.settings.of_weights() != self.settings.of_weights():
            new._clear_caches()
        return new

    def _clear_caches(self) -> None:
        vars(self).update(
            _covariances=Cache(COVARIANCE_BYTES),
            _variances=Cache(KEPT_BYTES),
            _of_layers=Cache(KEPT_BYTES),
            _density=Cache(0),
        )

    def layer_prior(self, layer: str) -> float:
        """The prior precision of one layer."""
        return self.settings.layer_prior(layer)

    @property
    def parameter_names(self) -> list[str]:
        """The parameters with a posterior, in the order of ``model.parameters()``: the order of all weights side by
        side.
        """
        own = [name for layer in self.layers.values() for name in layer.parameter_names]
        model = [] if self.model is None else [name for name, _ in self.model.named_parameters()]
        places = {name: place for place, name in enumerate(model)}
        return sorted(own, key=lambda name: places.get(name, len(model)))

    @property
    def has_free_prior_precision(self) -> bool:
        """Whether a prior precision can be set."""
        return "prior_precision" in self.tunable

    @property
    def width_parameter(self) -> str | None:
        """The hyperparameter by which the posterior is made wider or narrower: ``"prior_precision"``, ``"scale"`` where
        training fixed the prior, or None.
        """
        return next((name for name in ("prior_precision", "scale") if name in self.tunable), None)

    def reported(self) -> dict[str, Any]:
        """Label to value of the hyperparameters that reports show; ``"per layer"`` for prior precisions by layer."""
        known, shown = self.tunable | self.fixed_by_training, dict[str, Any]()
        for name, value in self.settings.plain().items():
            about = HYPERPARAMETERS[name]
            if about.reported and name in known:
                shown[about.label] = "per layer" if isinstance(value, dict) else value
        if self.likelihood.has_noise and self.likelihood.noise_variance is None:  # else that is reported
            shown[HYPERPARAMETERS["noise_scale"].label] = self.noise_scale
        return shown

    def _checked(self, name: str, value: Any) -> Any:
        """A value that the hyperparameter may have; where it cannot be changed, only its present one."""
        present, valid = getattr(self.settings, name), self._valid(name, value)
        if name in self.tunable:
            return valid
        if name in self.fixed_by_training and present != valid:
            instead = ", or change scale to widen or narrow the posterior" if "scale" in self.tunable else ""
            raise PosthocUQError(
                f"The {HYPERPARAMETERS[name].label} was a part of what method={self.method!r} optimised, and is "
                f"{present}; fit again with {name}={value}{instead}."
            )
        if present != valid:
            about = HYPERPARAMETERS[name]
            raise PosthocUQError(
                f"This posterior by method={self.method!r} has no {about.label}: {about.lacking}. Leave {name} at "
                f"{present}."
            )
        return present

    def _valid(self, name: str, value: Any) -> Any:
        about = HYPERPARAMETERS[name]
        if about.by_class:
            numbers: Any = value.tolist() if hasattr(value, "tolist") else value
            numbers = list(numbers) if isinstance(numbers, tuple) else numbers  # pyright: ignore[reportUnknownArgumentType]
            return tuple(check_option(name, numbers, about.kind))
        if not about.by_layer or not isinstance(value, Mapping):
            return check_option(name, value, about.kind)
        priors = {
            str(layer): check_option(f"{name} of layer '{layer}'", number, Magnitude)
            for layer, number in cast(Mapping[str, Any], value).items()
        }
        if priors.keys() != self.layers.keys():
            stray = [layer for layer in priors if layer not in self.layers]
            missing = sorted(self.layers.keys() ^ priors.keys())
            raise PosthocUQError(
                f"{name} per layer must name every layer once; these do not match: {missing[:5]}."
                f"{did_you_mean(stray, self.layers)}"
            )
        return LayerPriors(priors)

    def _basis_of_promises(self) -> dict[str, Any]:
        """What promises depend on: the settings and, with the moments head, its calibration."""
        promises = self.history.promises
        calibrated = promises is not None and promises.head.get("head") == "moments"
        return self.settings.plain() | ({"calibration": self.history.calibration} if calibrated else {})

    @property
    def keeps_promises(self) -> bool:
        """Whether it has held-out scores that were measured with its settings."""
        promises = self.history.promises
        return promises is not None and same_settings(promises.valid_at, self.settings.plain())

    def warn_if_void(self, before: Posterior) -> None:
        """Warn if promises that this posterior has from `before` held there, and no longer do."""
        promises = self.history.promises
        if promises is None or promises is not before.history.promises:
            return
        if before.keeps_promises and self._basis_of_promises() != before._basis_of_promises():
            self._warn_of_void()

    def _warn_of_void(self) -> None:
        promises = self.history.promises
        assert promises is not None
        warn_user(
            f"The promises by {promises.samples:,} held-out samples were made for other hyperparameters and no longer "
            f"hold; calibrate again: posterior = uq.calibrate(posterior, val_loader)."
        )

    def require(self, needs: Collection[str], what: str, way_out: str = "") -> None:
        """Refuse what the blocks cannot do.

        Args:
            needs: names of capabilities.
            what: the request that needs them, as the subject of a sentence.
            way_out: what to do instead, as the end of that sentence.

        Raises:
            PosthocUQError: a capability is missing.
        """
        missing = sorted(set(needs) - self.capabilities)
        if missing:
            end = f"; {way_out}." if way_out else "."
            raise PosthocUQError(
                f"{what} needs {' and '.join(missing)}, which the blocks of method={self.method!r} do not have{end}"
            )

    @property
    def device(self) -> torch.device:
        """Where the blocks live."""
        return next(iter(next(iter(self.blocks.values())).tensors().values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the blocks."""
        return next(iter(next(iter(self.blocks.values())).tensors().values())).dtype

    @property
    def noise_variance(self) -> Tensor | None:
        """Noise variance of each output, ``(outputs,)`` float64, or None where the likelihood has none."""
        return self.observation.noise_variance

    @property
    def observation(self) -> Likelihood:
        """The likelihood of the targets at the present noise scale; `likelihood` is that of the fit."""
        scale = self.noise_scale
        return self.likelihood if scale == 1.0 else self.likelihood.at_noise_scale(scale)

    def sample(self, n: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw `n` sets of weights.

        The i-th draw depends on the generator alone, not on `n`, the device or other draws; without a
        generator the draws differ from call to call. The global random state is never touched.

        That holds for one fit. A fit with other rounding (on another device, with the data in another order) has the
        same distribution up to rounding, but with ``"kfac"`` and ``"efb"`` one seed then gives other draws: draws are
        made along eigenvectors, and those of close eigenvalues are defined only up to a rotation.

        Returns:
            Parameter name to ``(n, *shape)``, in the parameters' dtype and on their device.

        Raises:
            PosthocUQError: `n` is not positive.
        """
        return self.sample_from(self.draw_seeds(n, generator))

    def draw_seeds(self, n: int, generator: torch.Generator | None = None) -> list[int]:
        """The seeds of the `n` draws that `sample` would make with this generator, for `sample_from`.

        Raises:
            PosthocUQError: `n` is not positive.
        """
        n = check_option("The number of draws", n, Count)
        if generator is None:
            generator = torch.Generator()
            generator.seed()
        if not isinstance(cast(Any, generator), torch.Generator):
            raise PosthocUQError(f"generator must be a torch.Generator, not {shown(generator)}.")
        groups = -(-n // DRAW_GROUP)
        found = torch.randint(0, 2**56, (groups,), generator=generator, device=generator.device)
        return [DRAW_GROUP * group + place for group in found.tolist() for place in range(DRAW_GROUP)][:n]

    def sample_from(self, seeds: Sequence[int], *, signs: Sequence[int] | None = None) -> dict[str, Tensor]:
        """The draws of these seeds; each is the same, bit for bit, whatever other draws are made with it.

        Args:
            seeds: one per draw. A repeated seed gives the same deviation from the mean and is drawn only once.
            signs: 1 or -1 per draw, by which its deviation is multiplied: ``mean - deviation`` is as likely
                as ``mean + deviation``, and such a pair is antithetic (Hammersley, Morton 1956). None for 1.

        Returns:
            Parameter name to ``(draws, *shape)``, in the parameters' dtype and on their device.
        """
        if signs is not None:
            self.require([can.SYMMETRY], "A draw with a sign")
        unique = list(dict.fromkeys(seeds))
        places = {seed: place for place, seed in enumerate(unique)}
        index = torch.tensor([places[seed] for seed in seeds], device="cpu")
        draws = dict[str, Tensor]()
        for number, (name, block) in enumerate(self.blocks.items()):
            covariance, shape = self.covariance(name), self.layout.shape(name)
            like, of_block = next(iter(block.tensors().values())).new_empty(shape), dict[str, Tensor]()
            wide = any(
                self.mean[layer.weight].dtype == torch.float64 for layer, _ in self.layout.split(name, like)
            )
            step = 1 << max(1, _DRAWN_NUMBERS // max(1, like.numel())).bit_length() - 1  # of whole groups
            for start in range(0, len(unique), step):
                part = slice(start, min(len(unique), start + step))
                keys = mixed_seeds([seed // DRAW_GROUP for seed in unique[part]], number)
                own = [
                    key // DRAW_GROUP * DRAW_GROUP + seed % DRAW_GROUP
                    for key, seed in zip(keys, unique[part], strict=True)
                ]
                drawn = covariance.draws(own, like, wide)
                for layer, matrix in self.layout.split(name, drawn):
                    for parameter, values in layer.to_parameters(matrix).items():
                        if start == 0:
                            whole = len(unique), *values.shape[1:]
                            of_block[parameter] = self.mean[parameter].new_empty(whole)
                        of_block[parameter][part] = values
            for parameter, draw in of_block.items():
                mean = self.mean[parameter]
                if signs is not None:
                    sign = torch.tensor(signs, device="cpu").to(draw).reshape(-1, *[1] * mean.ndim)
                    draw = draw[index.to(draw.device)] * sign
                elif len(unique) < len(seeds):
                    draw = draw[index.to(draw.device)]
                draws[parameter] = draw.add_(mean) if covariance.centred else draw
        return draws

    def covariances(self) -> dict[str, Covariance]:
        """Every block's covariance, ready for use, by block name; the caller keeps them,
        however large they are.
        """
        return {name: self.covariance(name) for name in self.blocks}

    def variance(self) -> dict[str, Tensor]:
        """Marginal variance of every parameter, by name and in its shape.

        Raises:
            PosthocUQError: the blocks know none.
        """
        self.require([can.VARIANCES], "posterior.variance()")
        variances: dict[str, Tensor] = {}
        for name in self.blocks:
            matrices = self._variances.get(name)
            if matrices is None:
                of_layer = self._of_layers.get(name) if name in self.layers else None
                matrices = (of_layer or self.covariance(name)).variance()
                self._variances.put(name, matrices, matrices.nbytes)
            for layer, matrix in self.layout.split(name, matrices.clone()):
                variances |= layer.to_parameters(matrix)
        return variances

    def quadratic(self, jacobians: Mapping[str, Tensor]) -> Tensor:
        """``J Sigma J^T``, ``(q, q)``: the covariance of q linear functions of the weights.

        Args:
            jacobians: layer name to ``(q, groups, outputs, inputs)`` (the matrix view, bias last); absent
                layers count as zero.

        Raises:
            PosthocUQError: no layer is given, or one is unknown; or the blocks know no such forms.
        """
        self.require([can.QUADRATIC], "posterior.quadratic()")
        unknown = sorted(set(jacobians) - set(self.layers))
        if unknown or not jacobians:
            raise PosthocUQError(f"Jacobians must be given for layers of the posterior; unknown: {unknown}.")
        total = None
        for name, inner in self.members.items():
            if not any(layer in jacobians for layer in inner):
                continue
            part = self.covariance(name).quadratic(self.layout.join(name, jacobians))
            total = part if total is None else total + part
        assert total is not None
        return total

    def of_layer(self, layer: str) -> Covariance:
        """The covariance of one layer's weights, for its own outputs; kept for the next use while memory allows.

        Raises:
            PosthocUQError: the posterior has no such layer, or its blocks know no such covariance.
        """
        self.require([can.ROWS], "The covariance of one layer's rows")
        block, start = self.layout.home(layer)
        found = self._of_layers.get(layer)
        if found is None:
            shape, whole = self.layers[layer].matrix_shape, self.layout.shape(block)
            found = self.covariance(block).of_layer(start, shape, whole)
            self._of_layers.put(layer, found, _bytes_beyond(found, self.blocks[block]))
        return found

    def log_determinant(self) -> Tensor:
        """``log det P`` over all blocks, a scalar.

        Raises:
            PosthocUQError: the blocks know none.
        """
        self.require([can.LOG_DETERMINANT], "posterior.log_determinant()")
        return torch.stack([self.covariance(name).log_determinant() for name in self.blocks]).sum()

    def _centre(self) -> dict[str, Tensor]:
        """A copy of the mean, made while the model still is what it was at the fit: it may be trained further.

        Raises:
            PosteriorMismatchError: it was trained before anyone asked for it.
        """
        if self._copied_mean is None:
            self._check_weights()
            vars(self)["_copied_mean"] = {
                name: self.mean[name].detach().clone() for name in self.parameter_names
            }
        return cast("dict[str, Tensor]", self._copied_mean)

    def _check_weights(self) -> None:
        if self.fingerprint is not None and fingerprint(self.original) != self.fingerprint:
            raise PosteriorMismatchError(
                "The model's weights changed after the posterior was fitted or loaded, and those of the fit are gone. "
                "Give it a copy of its own: uq.fit(copy.deepcopy(model), loader)."
            )

    def log_prob(self, weights: Tensor | Mapping[str, Tensor] | nn.Module) -> Tensor:
        """The log density of the posterior at weights, in nats and float64; differentiable in them, so that it can be
        the penalty of a later training (elastic weight consolidation, with the covariance of the method). The first
        call keeps a copy of the weights of the fit, so that the model itself may then be trained further. Weights that
        are certain do not count.

        Args:
            weights: a vector in the order of `parameter_names`, a state dict, or a model; also several sets of them,
                with dimensions before the others, as `sample` draws them.

        Returns:
            A scalar; of several sets one number each.

        Raises:
            PosteriorMismatchError: the model was trained further between the fit and the first call.
            PosthocUQError: the blocks have no density, or the weights are not those of the posterior.
        """
        from posthoc_uq.posteriors.vectors import as_parameters

        self.require([can.PRECISION, can.LOG_DETERMINANT], "posterior.log_prob()")
        means = self._centre()
        sets, lead = as_parameters(weights, means)
        place = self.device if has_double(self.device) else torch.device("cpu")
        moved = {
            name: as_double(given).to(place) - as_double(means[name]).to(place)
            for name, given in sets.items()
        }
        matrices = {
            name: layer.to_matrix(moved[layer.weight], None if layer.bias is None else moved[layer.bias])
            for name, layer in self.layers.items()
        }
        covariances, total = self._for_density()
        for name, covariance in covariances.items():
            joined = self.layout.join(name, matrices)
            total = total - (joined * covariance.times_precision(joined)).flatten(1).sum(1) / 2
        return total.reshape(lead)

    def _for_density(self) -> tuple[dict[str, Covariance], Tensor]:
        """All covariances, kept however large they are, since a penalty asks in every step; and ``(log det P - n log
        2 pi) / 2`` over the uncertain weights.
        """
        found = self._density.get("all")
        if found is None:
            covariances = self.covariances()
            masks = [block.uncertain() for block in self.blocks.values()]
            certain = sum(int((~mask).sum()) for mask in masks if mask is not None)
            count = sum(layer.parameters for layer in self.layers.values()) - certain
            logs = [as_double(each.log_determinant().detach()) for each in covariances.values()]
            found = covariances, (torch.stack(logs).sum() - count * log(2 * pi)) / 2
            self._density.put("all", found, 0)
        return found

    def precision_matrix(self) -> Tensor:
        """The precision of all weights together, ``(weights, weights)`` in float64, in the order of `parameter_names`:
        that of ``model.parameters()``. Of weights that are certain it is infinite.

        Raises:
            PosthocUQError: the blocks have none, or it takes more than 4 GiB.
        """
        self.require([can.PRECISION], "posterior.precision_matrix()")
        names, places, start = self.parameter_names, dict[str, Tensor](), 0
        for name in names:
            size = self.mean[name].numel()
            places[name] = torch.arange(start, start + size, device="cpu").reshape(1, *self.mean[name].shape)
            start += size
        if 8 * start**2 > LARGEST_BYTES:
            raise PosthocUQError(
                f"The precision of {start:,} weights takes {8 * start**2 / 2**30:,.0f} GiB; log_prob and sample need "
                f"no such matrix."
            )
        matrix: Tensor | None = None
        by_layer = {
            name: layer.to_matrix(places[layer.weight], None if layer.bias is None else places[layer.bias])
            for name, layer in self.layers.items()
        }
        for name, block in self.blocks.items():
            shape, index = self.layout.shape(name), self.layout.join(name, by_layer).flatten()
            unit = as_double(torch.eye(len(index), dtype=torch.float64, device="cpu"))
            unit = unit.to(self.device) if has_double(self.device) else unit
            found = self.covariance(name).times_precision(unit.reshape(-1, *shape)).detach().flatten(1)
            matrix = found.new_zeros(start, start) if matrix is None else matrix
            index, uncertain = index.to(found.device), block.uncertain()
            if uncertain is not None:
                found.diagonal()[~uncertain.flatten().to(found.device)] = inf
            matrix[index.unsqueeze(1), index] = found
        assert matrix is not None
        return matrix

    def _at_mean(self) -> nn.Module:
        """A replica of the model at the posterior's mean."""
        if self.model is None:
            raise PosthocUQError("This posterior has no model: load it for one, uq.load(path, model).")
        self._check_weights()
        return replicate(self.model, self.trained_mean)

    def jacobians(self, *args: Any, **kwargs: Any) -> Tensor:
        """The Jacobian of the model's outputs by the weights with a posterior, at its mean, ``(samples, outputs,
        weights)`` in the order of `parameter_names`. Predictions never form it: it takes ``samples * outputs`` times
        the memory of the weights.

        Args:
            *args: what the model takes, or a batch as a loader gives it.
            **kwargs: of the model.

        Raises:
            PosteriorMismatchError: the model's weights changed since the fit.
            PosthocUQError: the posterior has no model.
        """
        from posthoc_uq.layers.jacobian import jacobians

        network, names = self._at_mean(), self.parameter_names
        weights = {name: p.detach() for name, p in network.named_parameters() if name in self.mean}
        parts = list[Tensor]()
        for batch in batches_of_call(args, kwargs, cast(nn.Module, self.model), network):
            found = jacobians(network, {name: weights[name] for name in names}, batch, count_samples(batch))
            parts.append(torch.cat([found[name].detach().flatten(2) for name in names], 2))
        return torch.cat(parts)

    def sample_gradients(self, inputs: Any, targets: Any) -> Tensor:
        """The gradient of every sample's ``log p(y | f(x))`` by the weights with a posterior, at its mean and its
        noise, ``(samples, weights)`` in the order of `parameter_names`.

        Args:
            inputs: of the model, as a loader gives them.
            targets: likewise.

        Raises:
            PosteriorMismatchError: the model's weights changed since the fit.
            PosthocUQError: the posterior has no model, or the targets do not fit its outputs.
        """
        from posthoc_uq.layers.sample_gradients import sample_gradients

        network, parts = self._at_mean(), list[Tensor]()
        for batch in BatchReader.of(cast(nn.Module, self.model)).read_all((inputs, targets)):
            assert batch.targets is not None
            with torch.no_grad():
                outputs = batch.copied().call(network)
            self.likelihood.check(outputs, batch.targets)
            pull = -self.observation.score(outputs, batch.targets)
            layers, found = list(self.layers.values()), None
            if not batch.whole:
                found = sample_gradients(network, layers, batch, outputs, pull, "vmap")
            found = found or sample_gradients(network, layers, batch, outputs, pull, "loop")
            assert found is not None
            by_name = dict[str, Tensor]()
            for layer in layers:
                by_name |= layer.to_parameters(found[layer.name])
            parts.append(torch.cat([by_name[name].flatten(1) for name in self.parameter_names], 1))
        return torch.cat(parts)

    @property
    def training_samples(self) -> int:
        """How many samples the fit saw, with updates since."""
        return self.evidence.samples

    @property
    def log_likelihood(self) -> float:
        """The sum of ``log p(y | f(x))`` of the training data at the trained weights and the present noise, in nats;
        weighted where the fit had weights.

        Raises:
            PosthocUQError: the fit saw no targets.
        """
        return float(self.evidence.at_noise(self.noise_scale))

    def log_marginal_likelihood(
        self,
        prior_precision: float | Tensor | Mapping[str, float | Tensor] | None = None,
        noise_scale: float | Tensor | None = None,
    ) -> Tensor:
        """Laplace's approximation to ``log p(data)`` (MacKay 1992), a scalar in nats:
        ``log p(D | theta) - (log det P - sum n log tau + sum tau |theta|^2) / 2``; with a prior of single weights
        ``sum log(tau r_i)`` and ``sum tau r_i (theta_i - mu_i)^2`` (`WeightPrior`).

        Args:
            prior_precision: tau to evaluate at, differentiably where it is a tensor (a scalar, or by layer
                name); the posterior's own if None.
            noise_scale: factor on the noise variance, likewise.

        Raises:
            PosthocUQError: the fit saw no labels, or the variances are no Laplace approximation's.
        """
        noise_factor = self.noise_scale if noise_scale is None else noise_scale
        parts = [self.occam_factor(name, prior_precision, noise_scale) for name in self.blocks]
        return self.evidence.at_noise(noise_factor) - 0.5 * torch.stack(parts).sum()

    def occam_factor(
        self,
        block: str,
        prior_precision: float | Tensor | Mapping[str, float | Tensor] | None = None,
        noise_scale: float | Tensor | None = None,
    ) -> Tensor:
        """One block's ``log det P - sum n log tau + sum tau |theta|^2``, a scalar."""
        tuned = _TUNE if self.width_parameter is not None or self.likelihood.logits else ""
        self.require([can.LOG_DETERMINANT], "The log marginal likelihood", tuned)
        if "prior_precision" not in self.blocks[block].tunable:
            raise PosthocUQError(
                f"method={self.method!r} has no log marginal likelihood: it found its posterior for one given prior "
                f"(see report()). Fit again with another prior_precision{tuned and f', or {tuned}'}."
            )
        prior = self.prior_precision if prior_precision is None else prior_precision
        if prior_precision is None and noise_scale is None:
            covariance = self.covariance(block)
        else:
            covariance = self.blocks[block].covariance(self.block_settings(block, prior, noise_scale))
        total: Any = covariance.log_determinant()
        uncertain = self.blocks[block].uncertain()
        chosen = [] if uncertain is None else self.layout.split(block, uncertain)
        masks = {layer.name: mask for layer, mask in chosen}
        for name in self.members[block]:
            count, logs, squares = self.weight_prior.sums(self.layers[name], self.mean, masks.get(name))
            tau: Any = prior[name] if isinstance(prior, Mapping) else prior
            logarithm = tau.log() if isinstance(tau, Tensor) else log(tau)
            total = total - count * logarithm - logs + tau * squares
        return total

    def covariance(self, block: str) -> Covariance:
        """A block's covariance, ready for use; kept while memory allows."""
        covariance = self._covariances.get(block)
        if covariance is None:
            covariance = self.blocks[block].covariance(self.block_settings(block))
            self._covariances.put(block, covariance, _bytes_beyond(covariance, self.blocks[block]))
        return covariance

    def block_settings(
        self, block: str, prior_precision: Any = None, noise_scale: float | Tensor | None = None
    ) -> PrecisionSettings:
        """What a block's precision ``scale * I + prior_precision`` depends on.

        Args:
            block: its name.
            prior_precision: tau, one number or one by layer; the present one if None.
            noise_scale: factor on the noise variance, likewise.
        """
        settings, members = self.settings, self.members[block]
        prior = settings.prior_precision if prior_precision is None else prior_precision
        noise_factor = settings.noise_scale if noise_scale is None else noise_scale
        if isinstance(prior, Mapping):
            by_layer = cast(Mapping[str, Any], prior)
            parts = [host_double(by_layer[name]).expand(self.layers[name].parameters) for name in members]
            prior = by_layer[members[0]] if len(members) == 1 else torch.cat(parts).reshape(1, 1, -1)
        if self.weight_prior.precision:
            matrices = [layer_matrix(self.layers[name], self.weight_prior.precision) for name in members]
            joined = torch.cat([matrix.flatten() for matrix in matrices]).reshape(self.layout.shape(block))
            factors = as_double(joined)
            prior = factors * (prior.to(factors) if isinstance(prior, Tensor) else prior)
        # of other likelihoods the noise scale is a factor on the dispersion of predictions alone
        power = 0 if self.likelihood.noise_variance is None else self.evidence.noise_power
        return PrecisionSettings(settings.scale / noise_factor**power, prior, settings.residual_weight)

    def without_data(self, precision: float | Mapping[str, float]) -> Posterior:
        """The prior as a posterior that saw nothing: ``N(., 1 / precision)`` over the weights of the same layers, with
        the factors that the prior has on the precisions of single weights.

        Args:
            precision: one number, or one by layer; layers that it does not name are left out.

        Raises:
            PosthocUQError: a precision is not positive and finite.
        """
        blocks: dict[str, Block] = {}
        for name, layer in self.layers.items():
            if isinstance(precision, Mapping) and name not in precision:
                continue
            layer_precision = precision[name] if isinstance(precision, Mapping) else precision
            if not 0 < layer_precision < float("inf"):
                raise PosthocUQError(f"prior_precision must be positive and finite, not {layer_precision}.")
            like = self.original[layer.weight]
            kind = torch.float64 if like.dtype == torch.float64 else torch.float32
            variance = torch.full(layer.matrix_shape, 1.0 / layer_precision, dtype=kind, device=like.device)
            if self.weight_prior.precision:
                variance = variance / layer_matrix(layer, self.weight_prior.precision).to(variance)
            blocks[name] = MeanFieldBlock(variance, 1)
        layers, members = {name: self.layers[name] for name in blocks}, {name: [name] for name in blocks}
        evidence = Evidence(1, noise_power=0)
        return Posterior(self.method, layers, blocks, members, self.original, self.likelihood, evidence)

    def training_precisions(self) -> dict[str, float]:
        """The prior precisions by layer that a training used: of all weights alike, or for the last layer's weights the
        posterior's prior precision, and for the others the one of the training's body variance, if it had any. A weight
        that may be off has the variance of one that is on times the probability of that.

        Raises:
            PosthocUQError: the posterior does not say which layer that was.
        """
        fitted = self.history.fit
        if fitted.get(ONE_PRIOR):
            share = float(fitted.get("prior inclusion", 1.0))  # of the weights are on
            return {name: self.layer_prior(name) / share for name in self.layers}
        last, body = fitted.get("last layer"), fitted.get("prior body variance", 0.0)
        if last not in self.layers:
            raise PosthocUQError(
                "This trained posterior does not say what its prior was; fit again, or ask "
                "for predictor.novelty(..., of='class')."
            )
        precisions = {name: 1 / body for name in self.layers if name != last and body > 0}
        return precisions | {last: self.layer_prior(last)}

    def report(self) -> Report:
        """What was fitted and how, with a table of the layers: a text. See `Report` for its lines and its values."""
        from posthoc_uq.posteriors.report import (
            Report,
            described_history,
            described_novelty,
            described_output,
        )

        blocks, history = self.blocks, self.history
        rows: list[dict[str, Any]] = []
        for name, layer in self.layers.items():
            row = {"layer": name, "kind": layer.kind, "shape": "x".join(map(str, layer.matrix_shape))}
            row |= {"prior precision": self.layer_prior(name)}
            block = blocks.get(name)  # of this layer alone
            if block is not None:
                row |= {"numbers": block.numbers(), "bytes": block.bytes(), **block.summary()}
            rows.append(row)
        summary: dict[str, Any] = {"method": self.method, "likelihood": self.likelihood.name}
        if blocks:  # else it is of outputs alone
            summary |= {
                "layers": len(self.layers),
                "parameters with a posterior": sum(layer.parameters for layer in self.layers.values()),
                "numbers stored": sum(block.numbers() for block in blocks.values()),
                "bytes stored": sum(block.bytes() for block in blocks.values()),
            }
        summary |= self.reported()
        if heads := self.likelihood.head_likelihoods:
            summary["likelihoods of the heads"] = ", ".join(f"{name} {h.name}" for name, h in heads.items())
        if self.features is not None:
            summary["novelty"] = described_novelty(self.features)
        if self.noise_variance is not None:
            summary["noise variance"] = [float(f"{value:.4g}") for value in self.noise_variance.tolist()]
        notes = dict.fromkeys(block.heads_note for block in blocks.values() if block.heads_note)
        if notes:
            summary["heads"] = "; ".join(notes)
        if history.output is not None:
            summary["outputs"] = described_output(history.output)
        columns = {name: text for block in blocks.values() for name, text in block.columns.items()}
        return Report(
            {**summary, **history.fit},
            rows,
            dict(history.deterministic),
            described_history(history, self.settings.plain()),
            columns,
        )
