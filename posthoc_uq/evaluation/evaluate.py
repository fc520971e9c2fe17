"""`evaluate`: one pass over each loader by every compared model; the result as tables, files, figures and a page."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn

from posthoc_uq.core.batches import (
    LOADER,
    WITH_TARGETS,
    Bar,
    Batch,
    BatchFunction,
    BatchReader,
    batches,
    check_loader,
    explained,
)
from posthoc_uq.core.devices import on_host
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.interrupts import defer_interrupts
from posthoc_uq.core.model import replicate
from posthoc_uq.core.options import Count, Natural, check_option, known_arguments, one_of, shown
from posthoc_uq.core.outputs import OutputChoice, output_tensor
from posthoc_uq.core.progress import bars_shown
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.core.steady import steady
from posthoc_uq.core.tables import csv_text, text_table
from posthoc_uq.evaluation.measurements import (
    FAMILIAR,
    LARGE_WHERE,
    SCORE_USES,
    Example,
    Measurements,
    ReportTable,
    at_one_level,
    column_decimals,
    column_meanings,
    title_of,
)
from posthoc_uq.files.atomic import write
from posthoc_uq.heads.ensemble import EnsemblePredictor
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.referral import Referral
from posthoc_uq.likelihoods import Likelihood, resolve_likelihood
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.prediction import Missing, Prediction, cat, score_of
from posthoc_uq.likelihoods.selective import SCORES
from posthoc_uq.likelihoods.weights import counting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Measurements):
    """Predictions of several data sets by several predictors, and the numbers measured on them; `str` gives tables.

    Example:
        ```python
        evaluation = uq.evaluate(predictor, val_loader)
        print(evaluation)  # tables
        print(evaluation.metrics[evaluation.names[0]]["ece"])
        evaluation.to_csv("numbers.csv")
        ```
    """

    def __str__(self) -> str:
        parts, said = list[str](), set[str]()
        for title, table in self.tables().items():
            header, rows = at_one_level(table)
            lines = [line for line in column_meanings(header) if line not in said]
            said |= {*lines}
            text = text_table(
                [*map(title_of, header)], rows, digits=column_decimals(header, rows), indent="  "
            )
            parts.append("\n".join([f"{title}\n\n{text}", *(f"  {line}" for line in lines)]))
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return f"Evaluation(models={self.names}, foreign={self.foreign_names}, inputs={len(self.targets)})"

    def rows(self) -> list[dict[str, Any]]:
        """Every number, one dictionary each: ``model, data, score, measure, value``; score is empty for quality."""
        numbers: list[dict[str, Any]] = []

        def add(model: str, data: str, score: str, values: Mapping[str, float]) -> None:
            for measure, value in values.items():
                numbers.append(
                    {"model": model, "data": data, "score": score, "measure": measure, "value": value}
                )

        for model in self.names:
            add(model, FAMILIAR, "", self.metrics[model])
            add(model, FAMILIAR, "", self.promised.get(model, {}))
            for score, values in self.selective[model].items():
                add(model, FAMILIAR, score, values)
            for data, by_score in self.foreign[model].items():
                for score, values in by_score.items():
                    add(model, data, score, values)
        return numbers

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write `rows` as a table of five columns. A name that a spreadsheet would compute as a formula gets an
        apostrophe in front.

        Raises:
            PosthocUQError: the file cannot be written; an existing one is left as it was.
        """
        text = StringIO(newline="")
        writer = csv.DictWriter(text, ["model", "data", "score", "measure", "value"])
        writer.writeheader()
        writer.writerows(
            {column: csv_text(cell) if isinstance(cell, str) else cell for column, cell in row.items()}
            for row in self.rows()
        )
        _put(path, text.getvalue())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, fit for JSON; numbers that are not finite are None."""
        rates = {f"{rate:g}": rate for rate in self.referral_rates}
        thresholds = {
            name: {
                score: {shown_rate: self.threshold(rate, score, name) for shown_rate, rate in rates.items()}
                for score in self.selective[name]
            }
            for name in self.names
        }
        values = {
            "inputs": {data: len(p) for data, p in next(iter(self.predictions.values())).items()},
            "quality": self.metrics,
            "promised": self.promised,
            "promised_by_class": self.promised_by_class,
            "coverage_by_group": {row: found.to_dict() for row, found in self.coverage_by_group.items()},
            "selective": self.selective,
            "foreign": self.foreign,
            "thresholds": thresholds,
            LARGE_WHERE: {score: SCORE_USES[score] for row in self.selective.values() for score in row},
            "referred": self.referred,
        }
        return cast(dict[str, Any], _finite_or_none(values))

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict`.

        Raises:
            PosthocUQError: the file cannot be written; an existing one is left as it was.
        """
        _put(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def figures(self) -> dict[str, Figure]:
        """Figures by name: reliability or coverage, promises, scores on familiar and foreign data, risk of the rest."""
        return _page().figures(self)

    def report(self, path: str | os.PathLike[str], *, title: str = "How far to trust this model") -> Path:
        """Write one HTML file that needs nothing else: contents, tables, figures, and the images worth a look; details
        are folded, and it follows the browser's light or dark scheme.

        Args:
            path: of the file.
            title: its heading.

        Returns:
            The path.

        Raises:
            PosthocUQError: the file cannot be written; an existing one is left as it was.
        """
        _put(path, _page().html(self, title))
        return Path(path)


@dataclass(frozen=True, eq=False, repr=False)
class JointEvaluation(Evaluation):
    """What was measured of several heads: ``evaluation.label`` is the `Evaluation` of that head, or
    ``evaluation["label"]``. `metrics` begin with the name of the head; tables, rows and files are those of all heads.
    """

    @cached_property
    def heads(self) -> dict[str, Evaluation]:
        """By head, its `Evaluation`."""
        whole: Any = self.predictions
        first: Any = self.predictions[self.names[0]][FAMILIAR]
        names = cast(Mapping[str, Any], self.class_names or {})
        return {
            name: Evaluation(
                {row: {data: each[name] for data, each in by_set.items()} for row, by_set in whole.items()},
                own,
                {},
                self.score if self.score in first[name].scores() else None,
                self.referral_rates,
                self.bins,
                names.get(name),
                self.display,
                self.joint,
                self.referral,
            )
            for name, own in first.split_targets(self.targets).items()
        }

    def __getitem__(self, name: str) -> Evaluation:
        if name not in self.heads:
            raise PosthocUQError(f"There is no head {name!r}; there are {list(self.heads)}.")
        return self.heads[name]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and "predictions" in vars(self) and name in self.heads:
            return self.heads[name]
        raise AttributeError(f"A JointEvaluation has no {name!r}; ask that of one of its heads.")

    def __repr__(self) -> str:
        return f"JointEvaluation({', '.join(f'{name}={found!r}' for name, found in self.heads.items())})"

    def tables(self) -> dict[str, ReportTable]:
        """See `Evaluation`; titles begin with the name of the head."""
        return {
            f"{name}: {title[0].lower()}{title[1:]}": table
            for name, found in self.heads.items()
            for title, table in found.tables().items()
        }

    def rows(self) -> list[dict[str, Any]]:
        """See `Evaluation`; models are named with the head: ``"linearized, label"``."""
        return [
            row | {"model": f"{row['model']}, {name}"}
            for name, found in self.heads.items()
            for row in found.rows()
        ]

    def to_dict(self) -> dict[str, Any]:
        """The `to_dict` of every head."""
        return {name: found.to_dict() for name, found in self.heads.items()}

    def figures(self) -> dict[str, Figure]:
        """See `Evaluation`; titles begin with the name of the head."""
        return {
            f"{name}: {title}": figure
            for name, found in self.heads.items()
            for title, figure in found.figures().items()
        }

    def report(self, path: str | os.PathLike[str], *, title: str = "How far to trust this model") -> Path:
        """Of one head: ``evaluation[head].report(path)``."""
        raise PosthocUQError(
            f"A page is of one of the heads {list(self.heads)}: evaluation[head].report(path)."
        )


def _page() -> Any:
    """The wing's module that draws and writes, with matplotlib."""
    return import_module("posthoc_uq.app.page")


def _put(path: str | os.PathLike[str], text: str) -> None:
    write(path, BytesIO(text.encode()))


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite_or_none(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list):
        return [_finite_or_none(v) for v in cast(list[Any], value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# The models that an evaluation compares.


@dataclass(frozen=True)
class _Row:
    """A predictor, a plain model or a function: one row of the tables.

    Attributes:
        name: in the tables.
        call: from a batch to its prediction.
        reader: of batches for it.
        missing: of its likelihood.
    """

    name: str
    call: Callable[[Batch], Prediction]
    reader: BatchReader
    missing: Missing


@dataclass(frozen=True)
class _PlainModels:
    """How the outputs of models without a posterior are read.

    Attributes:
        likelihood: of their outputs.
        noise_variance: of regression.
        choice: which part of what they return the outputs are.
        assumed: whether nobody named the likelihood, and no predictor has one.
    """

    likelihood: Likelihood
    noise_variance: Tensor | None
    choice: OutputChoice | None
    assumed: bool

    def prediction(self, output: Any) -> Prediction:
        """A model's output as the prediction of one weight sample; a prediction as it is.

        Raises:
            PosthocUQError: one output an input, which cannot be the classification that is assumed.
        """
        if isinstance(output, Prediction):
            return output
        outputs = output_tensor(output).clone()  # a function may fill the same tensor again
        if self.assumed and outputs.shape[1:].numel() == 1:
            raise PosthocUQError(
                f"The model has one output an input, {tuple(outputs.shape)}, and without a predictor evaluate takes "
                f"outputs for the logits of classes; pass likelihood='regression', or 'binary' for one logit."
            )
        noise, likelihood = self.noise_variance, self.likelihood
        likelihood = likelihood if noise is None else likelihood.with_noise(noise)
        return likelihood.from_draws(outputs.unsqueeze(0)).of_one_network()


def _compared(compared: Any, likelihood: str | Likelihood | None) -> list[_Row]:
    """The rows for a predictor, a plain model, a function, or a mapping from names to those.

    Raises:
        PosthocUQError: nothing to compare, or something that does not predict.
    """
    named = dict(cast(Mapping[str, Any], compared)) if isinstance(compared, Mapping) else {"": compared}
    if not named:
        raise PosthocUQError("evaluate needs at least one predictor.")
    predictors = [model for model in named.values() if isinstance(model, (Predictor, EnsemblePredictor))]
    plain_likelihood = (
        predictors[0].observation
        if likelihood is None and predictors
        else resolve_likelihood("classification" if likelihood is None else likelihood)
    )
    noise_variance: Tensor | None = None
    if plain_likelihood.noise_variance is not None and (likelihood is None or isinstance(likelihood, str)):
        # of the first predictor that has one; else 0, and no density is measured
        noise_variances = [p.observation.noise_variance for p in predictors]
        noise_variance = next(
            (variance for variance in noise_variances if variance is not None), torch.zeros((), device="cpu")
        )
    choice = next((found for p in predictors if (found := p.output_choice) is not None), None)
    plain = _PlainModels(plain_likelihood, noise_variance, choice, likelihood is None and not predictors)
    return [_row(str(name), model, plain) for name, model in named.items()]


def _row(name: str, model: Any, plain: _PlainModels) -> _Row:
    """One row; of a plain model that returns no tensor, or of one like the predictors', the outputs are the choice."""
    if isinstance(model, (Predictor, EnsemblePredictor)):
        return _Row(
            name or model.head,
            model,
            BatchReader.of(model.model, device=model.device, output=model.output_choice),
            model.observation.missing,
        )
    if isinstance(model, nn.Module):
        twin = replicate(model)

        def predict(batch: Batch) -> Prediction:
            with explained(lambda: twin, batch, "a batch of the loader", LOADER):
                output = batch.copied().call_any(twin)
            choice = plain.choice
            if choice is not None and (callable(choice.part) or not isinstance(output, (Tensor, Prediction))):
                output = choice.of(output)
            return plain.prediction(output)

        reader = BatchReader.of(twin, output=plain.choice)
        return _Row(name or "model", predict, reader, plain.likelihood.missing)
    if callable(model):
        return _Row(
            name or "function",
            lambda batch: plain.prediction(batch.copied().call_any(model)),
            BatchReader(torch.device("cpu")),
            plain.likelihood.missing,
        )
    raise PosthocUQError(
        f"evaluate takes a predictor from uq.wrap, a model, or a mapping of names to those; not a "
        f"{type(model).__name__}."
    )


# The few images worth a look, kept while the batches pass, so that no data set is kept in memory.


@dataclass
class _Gallery:
    """The `size` offered images of a data set with the largest (or smallest) score."""

    size: int
    score: str
    data: str
    largest: bool = True
    mistakes_only: bool = False
    examples: list[Example] = field(default_factory=list[Example])

    def offer(self, batch: Batch, prediction: Prediction, targets: Tensor | None, start: int) -> None:
        """Look at one batch, whose first input is number `start`; of predictions with one class an input."""
        images = next(iter(batch.tensors), None)
        if images is None or images.ndim != 4 or images.shape[1] not in (1, 3, 4) or self.size < 1:
            return
        if prediction.kind != "classes":
            return
        prediction = cast(ClassPrediction, prediction)
        labels = None if targets is None else prediction.labels(prediction.fitting(targets))
        sign = 1.0 if self.largest else -1.0
        scores = score_of(prediction, self.score).cpu()
        order = sign * torch.nan_to_num(scores, nan=torch.inf)
        if self.mistakes_only and labels is not None:
            order = order.masked_fill(prediction.predicted().cpu() == labels.cpu(), -torch.inf)
        probability, predicted = prediction.probs.max(dim=-1)
        picked = [(sign * example.score, example) for example in self.examples]
        for index in order.topk(min(self.size, len(order))).indices.tolist():
            if order[index] != -torch.inf:
                example = Example(
                    images[index],
                    self.data,
                    start + index,
                    float(scores[index]),
                    int(predicted[index]),
                    float(probability[index]),
                    None if labels is None else int(labels[index]),
                )
                picked.append((float(order[index]), example))
        best = [example for _, example in sorted(picked, key=lambda pair: -pair[0])[: self.size]]
        # in one copy from the device; and cloned, since a view would keep the whole batch in memory
        new = [place for place, example in enumerate(best) if example.index >= start]
        for place, image in zip(
            new, on_host(*(best[place].image.detach().float() for place in new)), strict=True
        ):
            best[place] = replace(best[place], image=image.clone())
        self.examples = best


# One pass over each loader.

Compared = Predictor | EnsemblePredictor | nn.Module | Callable[..., Any]


@defer_interrupts
@known_arguments
def evaluate(
    predictor: Compared | Mapping[str, Compared],
    loader: Iterable[Any],
    *,
    ood_loaders: Mapping[str, Iterable[Any]] | Iterable[Any] | None = None,
    likelihood: str | Likelihood | None = None,
    score: str | None = None,
    joint: Sequence[Sequence[str]] = (),
    referral_rates: Sequence[float] = (0.05, 0.1, 0.2, 0.5),
    referral: Referral | None = None,
    bins: int = 15,
    n_examples: int = 12,
    class_names: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    display: Callable[[Tensor], Tensor] | None = None,
    batch_to_inputs: BatchFunction | None = None,
    batch_to_targets: BatchFunction | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Measure how good and how well calibrated predictions are, and how well their uncertainty detects foreign inputs.

    Of outputs with positions only those count whose label is not ignored and that the model's attention mask attends
    to, in the scores of an input and in its referral, too. All compared models see the same batches, in one pass over
    each loader, so that a loader may shuffle or augment.
    Models, posteriors and the global random state stay as they are.

    Args:
        predictor: from `wrap`, a plain model, or a function of a batch that returns logits, means or a prediction; or
            several of these by name, each a row of the tables (the model alone beside its posterior, say).
        loader: data like those of the training, with targets.
        ood_loaders: foreign data by name (targets, if any, are ignored), or one loader.
        likelihood: of models without a posterior; by default that of the first predictor, or classification. If it is
            a name, a regression's noise variance is that of the first predictor; without one, no density is measured.
        score: by which the examples are chosen, one of `posthoc_uq.likelihoods.SCORES`; by default the entropy.
        joint: groups of scores, ``[("entropy", "mutual_information")]``, that detect foreign data together, by
            `posthoc_uq.evaluation.metrics.joint_tail`. Rows without one of a group's scores have no such number.
        referral_rates: shares of the inputs to refer, for selective prediction.
        referral: what it refers is reported for rows whose posterior `posthoc_uq.calibrate` gave held-out scores; by
            default at a rate of 0.05, where these allow it.
        bins: of the calibration errors.
        n_examples: images to keep of each kind, for the report.
        class_names: by class index, for the report; of several heads by the name of the head.
        display: one input image (channels, height, width) to colours in [0, 1]; by default its values are stretched.
        batch_to_inputs: as in `fit`.
        batch_to_targets: as in `fit`.
        progress: show a bar for each loader; by default on a terminal.

    Returns:
        An `Evaluation`: print it, or write it with `to_csv`, `to_json` or `report`. Of several heads a
        `posthoc_uq.evaluation.JointEvaluation`, which has one for each: ``evaluation.label``.

    Raises:
        PosthocUQError: nothing to compare, a loader without targets, or targets that do not fit the predictions.
        NonFiniteError: predictions that are NaN.
        PosteriorMismatchError: a model's weights changed meanwhile.

    Example:
        ```python
        rows = {"network": model, "INF": predictor}
        noise = {"noise": [torch.randn(20, 1, 6, 6)]}
        evaluation = uq.evaluate(rows, val_loader, ood_loaders=noise)
        print(evaluation)
        print(evaluation.metrics["INF"]["nll"])
        ```
    """
    rows, foreign = _compared(predictor, likelihood), _named_loaders(ood_loaders)
    check_loader(loader)
    progress = bars_shown(progress)
    for foreign_loader in foreign.values():
        check_loader(foreign_loader, "loader of foreign inputs")
    if score is not None:
        one_of("score", score, SCORES)
    rates = tuple(
        check_option("Each of referral_rates", rate, Annotated[float, Ge(0), Lt(1)])
        for rate in _listed("referral_rates", referral_rates)
    )
    groups, bins = _groups(joint), check_option("bins", bins, Count)
    check_option("referral", referral, Referral | None)
    n_examples = check_option("n_examples", n_examples, Natural)
    heads = next((row.reader.heads for row in rows if row.reader.heads), ())
    names = None if class_names is None else _class_names(class_names, heads)
    check_option("display", display, Callable[..., Any] | None)
    reader = replace(
        rows[0].reader,
        batch_to_inputs=batch_to_inputs,
        batch_to_targets=batch_to_targets,
        heads=heads,
        skips_missing=any(row.missing == "ignore" for row in rows),
    )

    # the examples are chosen by the last row
    by = score or "entropy"
    galleries = {
        "most uncertain": _Gallery(n_examples, by, FAMILIAR),
        "surest mistakes": _Gallery(n_examples, by, FAMILIAR, largest=False, mistakes_only=True),
    }
    with steady(*_models(predictor), call="evaluate"):
        familiar, targets = _pass(rows, loader, FAMILIAR, list(galleries.values()), reader, progress)
        assert targets is not None
        predictions = {row.name: {FAMILIAR: familiar[row.name]} for row in rows}
        for name, foreign_loader in foreign.items():
            gallery = galleries[f"{name}: least uncertain"] = _Gallery(n_examples, by, name, largest=False)
            found, _ = _pass(rows, foreign_loader, name, [gallery], reader, progress)
            for row, prediction in found.items():
                predictions[row][name] = prediction
    first = familiar[rows[0].name]
    kind = JointEvaluation if first.kind == "heads" else Evaluation
    return kind(
        predictions,
        first.fitting(targets),
        {title: gallery.examples for title, gallery in galleries.items() if gallery.examples},
        score,
        rates,
        bins,
        names,
        display,
        groups,
        referral,
    )


def _models(compared: Any) -> list[nn.Module]:
    """The models of what is compared, where there are any."""
    named = cast(Mapping[str, Any], compared).values() if isinstance(compared, Mapping) else [compared]
    models = list[Any]()
    for each in named:
        models += each.models if isinstance(each, EnsemblePredictor) else [each]
    return [
        each.model if isinstance(each, Predictor) else each for each in models if isinstance(each, nn.Module)
    ]


def _groups(joint: Any) -> tuple[tuple[str, ...], ...]:
    """The groups of scores that are used together."""
    groups = [
        group if isinstance(group, str) else _listed("Each group of joint", group)
        for group in _listed("joint", joint)
    ]
    if any(isinstance(group, str) or not group for group in groups):
        raise PosthocUQError(f"joint holds groups of scores, each of {SCORES}, not {groups!r}.")
    for name in (name for group in groups for name in group):
        one_of("Each score of joint", name, SCORES)
    return tuple(map(tuple, groups))


def _class_names(class_names: Any, heads: Sequence[str]) -> Any:
    """Names of classes as a list; of several heads a mapping from their names to lists."""
    if not heads:
        return _listed("class_names", class_names)
    if not isinstance(class_names, Mapping) or not {*cast(Mapping[Any, Any], class_names)} <= {*heads}:
        raise PosthocUQError(
            f"class_names of several heads are a mapping from names out of {[*heads]} to lists, not "
            f"{shown(class_names)}."
        )
    named = cast(Mapping[str, Any], class_names)
    return {head: _listed(f"class_names of {head!r}", names) for head, names in named.items()}


def _listed(name: str, value: Any) -> list[Any]:
    """A list, tuple or array as a list."""
    if (
        isinstance(value, (str, bytes, Mapping))
        or not isinstance(value, Iterable)
        or getattr(value, "ndim", 1) == 0
    ):
        raise PosthocUQError(f"{name} must be a list, not {shown(value)}.")
    return list(cast(Iterable[Any], value))


def _named_loaders(loaders: Any) -> dict[str, Iterable[Any]]:
    if loaders is None:
        return {}
    named = cast(
        dict[str, Iterable[Any]], dict(loaders) if isinstance(loaders, Mapping) else {"foreign": loaders}
    )
    if FAMILIAR in named:
        raise PosthocUQError(f"ood_loaders may not be named {FAMILIAR!r}; that is the first loader's name.")
    return {str(name): loader for name, loader in named.items()}


def _pass(
    rows: list[_Row],
    loader: Iterable[Any],
    name: str,
    galleries: list[_Gallery],
    reader: BatchReader,
    progress: bool,
) -> tuple[dict[str, Prediction], Tensor | None]:
    """Every row's prediction of a loader, and the targets of familiar data."""
    parts: dict[str, list[Prediction]] = {row.name: [] for row in rows}
    targets: list[Tensor] = []
    seen = 0
    with torch.no_grad(), isolated_random_state(), Bar(loader, f"evaluate {name}", progress) as bar:
        for batch in batches(loader, reader):
            for row in rows:
                moved = batch if row.reader.device == reader.device else batch.to(row.reader.device)
                parts[row.name].append(counting(row.call(moved).completed().to("cpu"), batch))
            last = parts[rows[-1].name][-1]
            if name == FAMILIAR:
                _check_targets(batch.targets, len(last), len(parts[rows[-1].name]) - 1)
                targets.append(cast(Tensor, batch.targets).cpu().clone())  # a loader may fill it again
            for gallery in galleries:
                labels = targets[-1] if name == FAMILIAR else None
                if labels is not None or not gallery.mistakes_only:
                    gallery.offer(batch, last, labels, seen)
            seen += len(last)
            bar.advance(len(last))
    joined = torch.cat(targets) if targets else None
    return {row: cat(predictions) for row, predictions in parts.items()}, joined


def _check_targets(targets: Tensor | None, inputs: int, batch: int) -> None:
    if targets is None:
        raise PosthocUQError(
            f"evaluate needs targets, and batch {batch} of the loader has inputs alone; {WITH_TARGETS}"
        )
    if targets.shape[:1] != (inputs,):
        raise PosthocUQError(
            f"Batch {batch}: there are {inputs} inputs, and targets of shape {tuple(targets.shape)}; give one row "
            f"an input."
        )
