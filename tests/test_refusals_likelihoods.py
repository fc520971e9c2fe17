"""What likelihoods and their predictions refuse: outputs, targets, weights and positions that do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import Row, hold
from small_fits import fit, inputs, labels, net
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import ClassPrediction, RegressionPrediction
from posthoc_uq.likelihoods import PositionPrediction

NAN = math.nan
X, Y = inputs(), labels()
REGRESSION: dict[str, Any] = {"likelihood": "regression", "model": net(outputs=2)}
BINARY: dict[str, Any] = {"likelihood": "binary", "model": net(outputs=1)}
LABELS = torch.zeros(4, 5).long()
SOFT = net()(X).softmax(1).detach()


def check(likelihood: uq.Likelihood, outputs: tuple[int, ...], targets: Tensor | None = None) -> None:
    likelihood.check(torch.zeros(outputs), targets)


def weighted(weights: Callable[[Tensor], Any], model: Any = None, data: Any = (X, Y), **options: Any) -> None:
    """A fit with the weights that a function makes of 0, 1, 2 and so on."""
    fit(model, [data], batch_to_weights=lambda batch: weights(torch.arange(len(batch[0]))), **options)


OUTPUTS = torch.randn(7, 5, 4, generator=torch.Generator().manual_seed(0))
CLASSES = ClassPrediction.from_logits(OUTPUTS)
ALONE = ClassPrediction(
    torch.full((2, 2), 0.5), torch.zeros(2, 1), torch.ones(2, 1)
)  # of a head without samples
PIXELS = uq.Categorical().from_draws(torch.randn(2, 3, 4, 2, 2))
VALUES = RegressionPrediction(torch.randn(4), torch.rand(4), 0.1)
COLUMN = RegressionPrediction(torch.zeros(4, 1), torch.zeros(4, 1), 0.1)


def of_ones(*shapes: Any, **options: Any) -> ClassPrediction:
    """A prediction of three inputs and two classes, whose other parts have these shapes."""
    parts = [None if shape is None else torch.ones(shape) for shape in ((3, 2), *shapes)]
    return ClassPrediction(*parts, **options)


def regression(outputs: Tensor, noise_variance: Any = 0.1) -> RegressionPrediction:
    drawn: Any = uq.Gaussian(1.0).from_blocks([outputs])
    return RegressionPrediction(drawn.mean, drawn.epistemic_variance, noise_variance)


ROWS = {
    # labels and targets of a fit
    "labels of another type": Row(lambda: fit(loader=[(X, Y.float())]), "integers of shape"),
    "labels in a column": Row(lambda: fit(loader=[(X, Y[:, None])]), r"pass y\.squeeze\(1\)"),
    "labels from 1": Row(lambda: fit(loader=[(X, Y + 1)]), r"pass y - 1\.$"),
    "ordered labels from 1": Row(
        lambda: check(uq.Ordinal(), (4, 2), torch.tensor([1, 2, 3, 1])),
        r"in 0\.\.2\. If they count from 1, pass y - 1\.$"),
    "integers, one-hot": Row(
        lambda: fit(loader=[(X, torch.nn.functional.one_hot(Y, 3))]), r"one-hot: pass y\.argmax\(1\)"),
    "labels of pixels from 1": Row(
        lambda: check(uq.Categorical(), (1, 2, 2, 2), torch.tensor([[[1, 2], [-100, 1]]])),
        r"If they count from 1, pass y - 1\.$"),
    "labels as zeros": Row(lambda: fit(loader=[(X, 0.0 * Y)]), r"batch\[1\]\.long\(\)"),
    "too few labels": Row(lambda: fit(loader=[(X, Y[1:])]), r"of shape \(11,\)"),
    "three binary labels": Row(lambda: fit(loader=[(X, Y)], **BINARY), "must be 0 or 1"),
    "the batch of a label": Row(lambda: fit(loader=[(X, Y), (X, Y + 5)]), "Batch 1: .*from 5"),
    "one output of classes": Row(lambda: fit(net(outputs=1)), "likelihood='binary'"),
    "three outputs of one label": Row(lambda: fit(likelihood="binary"), "'binary' needs outputs"),
    "targets of another shape": Row(
        lambda: fit(loader=[(X, X)], **REGRESSION), "do not fit outputs of shape .* choose the columns"),
    "labels of a regression": Row(
        lambda: fit(loader=[(X, Y)], **REGRESSION), "if the targets are classes, leave likelihood= out"),
    "targets as the method": Row(lambda: uq.fit(net(), X, Y), r"one argument: uq\.fit\(model, \[\(inputs"),
    "targets without numbers": Row(
        lambda: fit(loader=[(X, torch.full((12, 2), NAN))], **REGRESSION), "targets are not finite"),
    "no error at all": Row(
        lambda: fit(loader=[(X, REGRESSION["model"](X).detach())], **REGRESSION), "without error.*noise_variance"),
    "soft labels above 1": Row(lambda: fit(loader=[(X, 2 * SOFT)]), "Batch 0: Soft labels must be probabilities"),
    "soft labels below 0": Row(lambda: fit(loader=[(X, -SOFT)]), "Batch 0: Soft labels must be probabilities"),
    "soft labels as logs": Row(lambda: fit(loader=[(X, SOFT.log())]), "Batch 0: Soft labels must be probabilities"),
    "soft labels of two classes": Row(
        lambda: fit(loader=[(X, SOFT[:, :2])]), r"or probabilities of shape \(12, 3\)"),
    "soft labels of messages": Row(
        lambda: uq.fit(net(), [(X, SOFT)], "message_passing", progress=False), "soft ones of shape"),
    "cumulative logits out of order": Row(
        lambda: fit(net(), likelihood=uq.Ordinal(cumulative=True)), "that do not increase from one step"),
    # settings
    "noise twice": Row(lambda: fit(likelihood=uq.Gaussian(0.3), noise_variance=0.1), "its own noise"),
    "noise that depends on inputs": Row(
        lambda: fit(noise_variance=lambda x: x, **REGRESSION), "noise_variance must be a number"),
    "all of a label": Row(lambda: uq.Categorical(label_smoothing=1.0), "label_smoothing must be"),
    "class_dim": Row(lambda: uq.Categorical(class_dim=2), "class_dim must be"),
    "ignore_index": Row(lambda: uq.Categorical(ignore_index=3.5), "ignore_index must be a whole number"),
    "ignore_index, bool": Row(lambda: uq.Categorical(ignore_index=True), "ignore_index must be a whole number"),
    "ignore_index, text": Row(lambda: uq.Categorical(ignore_index="255"), "ignore_index must be a whole number"),
    "thresholds twice": Row(lambda: uq.Ordinal([0.0], cumulative=True), "Pass one of the two"),
    **{
        f"thresholds {given}": Row(lambda given=given: uq.Ordinal(given), "thresholds must")
        for given in ([], [1.0, 1.0], [2.0, 1.0], [NAN], "high")
    },
    **{
        f"{kind.__name__} {given}": Row(lambda kind=kind, given=given: kind(given), f"{name} must be")
        for kind, name in ((uq.NegativeBinomial, "dispersion"), (uq.Gamma, "shape"))
        for given in (0.0, -1.0, math.inf, "one")
    },
    # targets and outputs, by the likelihood
    "labels of which": Row(
        lambda: check(uq.Multilabel(), (4, 3), torch.zeros(4)), r"0 or 1 for each of 3 labels.*not \(4,\)"),
    "one and a half labels": Row(
        lambda: check(uq.Multilabel(), (4, 3), torch.full((4, 3), 1.5)), "must be 0 or 1, or probabilities"),
    "soft labels of tokens before": Row(
        lambda: check(uq.Categorical(-1, next_token=True), (2, 4, 3), torch.full((2, 4, 3), 1 / 3)),
        "leave next_token out"),
    "soft labels of pixels": Row(
        lambda: check(uq.Categorical(), (2, 3, 4, 4), torch.full((2, 3, 4, 4), 0.5)), "of sum 1.*zeros alone"),
    "no dimension of labels": Row(lambda: check(uq.Multilabel(), (4,)), r"outputs of shape \(samples, labels\)"),
    "half a count": Row(
        lambda: check(uq.Poisson(), (4, 1), torch.full((4,), 0.5)), "whole numbers of at least 0; these run from 0.5"),
    "a count below 0": Row(
        lambda: check(uq.Poisson(), (4, 1), torch.tensor([0, 1, -1, 2])), "these run from -1 to 2"),
    "counts of one output": Row(lambda: check(uq.Poisson(), (4, 2), torch.zeros(4)), "do not fit outputs"),
    "counts of another shape than the map": Row(
        lambda: check(uq.Poisson(), (4, 1, 2), torch.zeros(4, 2)), r"y.unsqueeze\(1\)"),
    "values of channels that come last": Row(
        lambda: check(uq.Gaussian(), (4, 5, 2), torch.zeros(4, 2, 5)), "channel_dim=-1"),
    "another dimension of channels": Row(lambda: uq.Multilabel(channel_dim=2), "channel_dim must be"),
    "several logits of one label": Row(lambda: check(uq.Bernoulli(), (4, 2, 5)), r"z.unsqueeze\(1\)"),
    "a gamma of 0": Row(lambda: check(uq.Gamma(), (4, 1), torch.zeros(4)), "finite numbers above 0"),
    "half of the outputs": Row(
        lambda: check(uq.Heteroscedastic(), (4, 3)), "all means and after them the logarithms"),
    "two targets of one mean": Row(
        lambda: check(uq.Heteroscedastic(), (4, 2), torch.zeros(4, 2)),
        "a mean and a log variance for each of 1 targets"),
    "targets that are no numbers": Row(
        lambda: check(uq.Heteroscedastic(), (4, 2), torch.full((4,), NAN)), "not finite"),
    "one output of times": Row(lambda: check(uq.Survival(), (4, 1)), "log lambda and log rho of a weibull"),
    "a time alone": Row(lambda: check(uq.Survival(), (4, 2), torch.ones(4)), "a time, and whether the event was seen"),
    "a time of 0": Row(lambda: check(uq.Survival(), (4, 2), torch.zeros(4, 2)), "finite and above 0"),
    "half an event": Row(
        lambda: check(uq.Survival(), (4, 2), torch.full((4, 2), 0.5)), r"1 or 0; .*censoring='interval'"),
    "times that descend": Row(
        lambda: check(uq.Survival(censoring="interval"), (4, 2), torch.tensor([[2.0, 1.0]] * 4)), "must not descend"),
    "a time without an end": Row(
        lambda: check(uq.Survival(censoring="interval"), (4, 2), torch.tensor([[0.0, math.inf]] * 4)),
        "from 0 to infinity says nothing"),
    "another family": Row(lambda: uq.Survival("gamma"), "family must be"),
    "a survival before 0": Row(
        lambda: uq.Survival().from_draws(torch.zeros(3, 4, 2)).survival(-1.0), "a time above 0"),
    "one output of two quantiles": Row(
        lambda: check(uq.Quantiles([0.1, 0.9]), (4, 1)), r"2 levels needs outputs of shape \(samples, 2\)"),
    "two targets of quantiles": Row(
        lambda: check(uq.Quantiles(), (4, 3), torch.zeros(4, 3)), "quantiles of one target"),
    "a target of quantiles that is no number": Row(
        lambda: check(uq.Quantiles(), (4, 3), torch.full((4,), NAN)), "not finite"),
    "levels that descend": Row(lambda: uq.Quantiles([0.9, 0.1]), r"ascending order.*output="),
    "a level of 1": Row(lambda: uq.Quantiles([0.5, 1.0]), "levels must be"),
    "one level": Row(lambda: uq.Quantiles([0.5]), r"such as \[\.05, \.5, \.95\]"),
    "a level as a number": Row(lambda: uq.Quantiles(0.5), "levels must be"),
    "quantiles of another number of levels": Row(
        lambda: uq.Quantiles().from_draws(torch.zeros(2, 4, 2)), r"\(draws, batch, 3\)"),
    "quantiles for a regression": Row(
        lambda: check(uq.Gaussian(), (4, 3), torch.zeros(4, 1)), r"likelihood=uq\.Quantiles"),
    "four ordered classes": Row(
        lambda: check(uq.Ordinal(), (4, 2), torch.arange(4)), r"3 ordered classes; labels must lie in 0\.\.2"),
    "no steps": Row(lambda: check(uq.Ordinal(), (4,)), r"\(samples, classes - 1\)"),
    "thresholds of two outputs": Row(lambda: check(uq.Ordinal([0.0, 1.0]), (4, 2)), "leave the thresholds out"),
    "labels as numbers": Row(
        lambda: check(uq.Ordinal([0.0, 1.0]), (4, 1), torch.zeros(4)), "Labels must be integers"),
    "a label below 0": Row(
        lambda: check(uq.Categorical(), (2, 300), torch.tensor([7, -1], dtype=torch.int8)), "Labels run from -1 to 7"),
    # positions
    "positions in a row": Row(
        lambda: check(uq.Categorical(), (6, 3, 2, 2), torch.zeros(6, 4).long()), r"labels of shape \(6, 2, 2\), not"),
    "classes at the end": Row(
        lambda: check(uq.Categorical(), (6, 4, 5), torch.zeros(6, 4).long()), "would fit class_dim=-1"),
    "a fourth class": Row(
        lambda: check(uq.Categorical(), (6, 3, 2, 2), torch.full((6, 2, 2), 3)), r"0\.\.2, or be ignore_index=-100"),
    "a fourth class, often": Row(
        lambda: check(uq.Categorical(), (2, 3, 2, 2), torch.full((2, 2, 2), 255).byte()),
        r"0\.\.2, or be ignore_index=-100\. If 255 marks .*ignore_index=255\)"),
    "a class of -1": Row(
        lambda: check(uq.Categorical(), (2, 3, 2, 2), torch.full((2, 2, 2), -1)),
        r"If -1 marks positions .*ignore_index=-1\)"),
    "a sample without a label": Row(
        lambda: check(uq.Categorical(), (2, 3), torch.tensor([0, -100])),
        "without a label out of the loader: ignore_index= is for outputs with"),
    "the next pixel": Row(
        lambda: check(uq.Categorical(next_token=True), (6, 3, 2, 2), torch.zeros(6, 2, 2).long()),
        "one dimension of tokens"),
    "the next of none": Row(lambda: check(uq.Categorical(next_token=True), (3, 4)), "one dimension of tokens"),
    # weights of samples
    **{
        f"weights of {size}": Row(
            lambda size=size: weighted(lambda w: torch.full(w.shape, size, dtype=torch.float64)),
            "too large: .* Divide all weights by their mean")
        for size in (1e13, 1e300)
    },
    "weights of other positions": Row(
        lambda: weighted(lambda w: torch.ones(4, 2), nn.Conv1d(4, 3, 1), (torch.ones(4, 4, 5), LABELS)),
        r"\(4,\), one a sample, or \(4, 5\), one a position, not \(4, 2\)"),
    # a likelihood of the user's
    "draws of an earlier release": Row(
        lambda: type("Old", (uq.Likelihood,), {"from_draws": lambda self, outputs: None}), "from_blocks"),
    "moments of an earlier release": Row(
        lambda: type("Old", (uq.Likelihood,), {"from_gaussian": lambda self, mean, variance: None}), "from_blocks"),
    "a name of an earlier release": Row(
        lambda: type("Old", (uq.Likelihood,), {"agrees": lambda self, outputs, draws: True}),
        "^Likelihood Old defines agrees, which is decisions_agree as of"),
    # predictions of classes
    "draws of one dimension too few": Row(lambda: ClassPrediction.from_logits(torch.zeros(3, 4)), "binary=True"),
    "draws of one class": Row(lambda: ClassPrediction.from_logits(torch.zeros(3, 4, 1)), "at least 2 classes"),
    "binary draws of two": Row(
        lambda: ClassPrediction.from_logits(torch.zeros(3, 4, 2), binary=True), "binary logits"),
    "no draws of classes": Row(
        lambda: ClassPrediction.from_logits(torch.zeros(0, 4, 2)), "at least one weight sample"),
    "draws of whole numbers": Row(lambda: ClassPrediction.from_logits(torch.zeros(3, 4, 2).long()), "floating-point"),
    "one dimension of probs": Row(
        lambda: ClassPrediction(torch.ones(3), torch.ones(3), torch.ones(3)), "batch, classes"),
    "logits_mean": Row(lambda: of_ones((3, 3), (3, 3)), "logits_mean"),
    "logits_variance": Row(lambda: of_ones((3, 2), (3, 1)), "logits_variance"),
    "sample_entropy": Row(lambda: of_ones((3, 2), (3, 2), 2), "sample_entropy"),
    "log_probs": Row(lambda: of_ones((3, 2), (3, 2), None, (3, 1)), "log_probs"),
    "probs_variance": Row(lambda: of_ones((3, 2), (3, 2), None, None, 3), "probs_variance"),
    "votes of a third": Row(lambda: of_ones((3, 2), (3, 2), votes=torch.ones(3, 3).long()), "votes"),
    "half a vote": Row(lambda: of_ones((3, 2), (3, 2), votes=torch.ones(3, 2)), "votes must be integers"),
    "a label more": Row(lambda: CLASSES.log_prob(torch.zeros(6).long()), "integer labels"),
    "labels of floats": Row(lambda: CLASSES.log_prob(torch.zeros(5)), "integer labels"),
    "labels in a column of classes": Row(lambda: CLASSES.log_prob(torch.zeros(5, 1).long()), "integer labels"),
    "a fifth class": Row(lambda: CLASSES.log_prob(torch.full((5,), 4)), "between 0 and 3"),
    "the class -1": Row(lambda: CLASSES.log_prob(torch.full((5,), -1)), "between 0 and 3"),
    "nothing to join": Row(lambda: ClassPrediction.cat([]), "at least one prediction"),
    "classes that differ": Row(
        lambda: ClassPrediction.cat([CLASSES, ClassPrediction.from_logits(torch.zeros(1, 1, 2))]), "different"),
    "an interval of classes": Row(lambda: CLASSES.interval(), r"prediction\.set"),
    "the first 0": Row(lambda: CLASSES.top_k(0), "between 1 and the 4 classes"),
    "the first 5": Row(lambda: CLASSES.top_k(5), "between 1 and the 4 classes"),
    "two names of four": Row(
        lambda: CLASSES.answers(names=["a", "b"]), "2 class names, and the model has 4 outputs"),
    "no samples, mutual information": Row(lambda: ALONE.mutual_information(), "no expected entropy"),
    "no samples, expected entropy": Row(lambda: ALONE.expected_entropy(), "no expected entropy"),
    "no samples, votes": Row(lambda: ALONE.variation_ratio(), "no votes"),
    # predictions of positions
    "no such score": Row(lambda: PIXELS.per_input("nonsense"), "scores of positions are"),
    "a mask of other inputs": Row(
        lambda: PIXELS.per_input(mask=torch.ones(2, 2, 2)), r"mask has shape .* \(3, 2, 2\)"),
    "positions of the class -1": Row(
        lambda: PIXELS.log_prob(torch.full((3, 2, 2), -1)), r"If -1 marks positions .*ignore_index=-1\)"),
    "a mask that stays": Row(lambda: PIXELS.masked(torch.ones(2, 2, 2)), "mask has shape .* is needed"),
    "inputs of two sizes": Row(
        lambda: PositionPrediction.cat([PIXELS, uq.Categorical().from_draws(torch.randn(2, 3, 4, 5, 1))]),
        "pad all inputs to one size"),
    # predictions of values
    "sets by class that were promised otherwise": Row(lambda: CLASSES.set(0.9, by_class=True), "by_class=True\\)"),
    "a set of values": Row(lambda: COLUMN.set(), r"prediction\.interval"),
    "draws of one sample": Row(lambda: regression(torch.zeros(3)), "mean must be"),
    "no draws of values": Row(lambda: regression(torch.zeros(0, 3)), "at least one weight sample"),
    "no blocks": Row(lambda: uq.Gaussian(1.0).from_blocks([]), "at least one weight sample"),
    "negative noise": Row(lambda: regression(torch.zeros(2, 3), -0.1), "at least 0"),
    "noise that is no number": Row(lambda: regression(torch.zeros(2, 3), NAN), "at least 0"),
    "noise of two": Row(lambda: regression(torch.zeros(2, 3), torch.ones(2)), "broadcast"),
    "epistemic_variance": Row(
        lambda: RegressionPrediction(torch.zeros(3), torch.zeros(3, 1), 0.1), "epistemic_variance"),
    "three dimensions of values": Row(
        lambda: RegressionPrediction(torch.zeros(3, 1, 1), torch.zeros(3, 1, 1), 0.1), "mean must be"),
    "values in a column": Row(lambda: VALUES.log_prob(torch.zeros(4, 1)), r"shape \(4,\), not \(4, 1\)"),
    "a density of no width": Row(
        lambda: regression(torch.zeros(1, 4), 0.0).log_prob(torch.zeros(4)), "positive variance"),
    "no draw": Row(lambda: VALUES.sample(0), "at least 1"),
    "no values to join": Row(lambda: RegressionPrediction.cat([]), "at least one prediction"),
    "values and a column": Row(lambda: RegressionPrediction.cat([VALUES, COLUMN]), "different shapes"),
    **{
        f"the interval {level}": Row(lambda level=level: VALUES.interval(level), "between 0 and 1")
        for level in (0, 1, 95, -0.5)
    },
    **{f"the quantile {q}": Row(lambda q=q: VALUES.quantile(q), "between 0 and 1") for q in (0, 1, NAN)},
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
