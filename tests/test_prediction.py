"""Every formula of the prediction objects against loops in float64 written from its definition."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np
import pytest
import torch

import posthoc_uq as uq
from posthoc_uq import ClassPrediction, PosthocUQError, RegressionPrediction
from posthoc_uq.likelihoods.draws import gathered

SAMPLES, BATCH, CLASSES = 7, 5, 4


def _logits(dtype: torch.dtype = torch.float32, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (scale * torch.randn(SAMPLES, BATCH, CLASSES, generator=generator)).to(dtype)


def _softmax(row: np.ndarray) -> list[float]:
    powers = [math.exp(z - max(row)) for z in row]
    return [p / sum(powers) for p in powers]


def _entropy(probabilities: list[float]) -> float:
    return -sum(p * math.log(p) for p in probabilities if p > 0)


def _by_hand(logits: torch.Tensor) -> dict[str, np.ndarray]:
    """All quantities of a classification from (samples, batch, classes), one input at a time."""
    values = logits.double().numpy()
    samples, batch, classes = values.shape
    names = ("probs", "mean", "variance", "entropy", "expected", "spread", "votes")
    out: dict[str, list] = {name: [] for name in names}
    for i in range(batch):
        rows = [_softmax(values[s, i]) for s in range(samples)]
        probs = [sum(row[c] for row in rows) / samples for c in range(classes)]
        mean = [sum(values[s, i, c] for s in range(samples)) / samples for c in range(classes)]
        variance = [
            sum((values[s, i, c] - mean[c]) ** 2 for s in range(samples)) / max(samples - 1, 1)
            for c in range(classes)
        ]
        out["probs"].append(probs)
        out["mean"].append(mean)
        out["variance"].append(variance)
        out["entropy"].append(_entropy(probs))
        out["expected"].append(sum(_entropy(row) for row in rows) / samples)
        out["spread"].append(
            [sum((row[c] - probs[c]) ** 2 for row in rows) / max(samples - 1, 1) for c in range(classes)]
        )
        winners = [max(range(classes), key=row.__getitem__) for row in rows]
        out["votes"].append([winners.count(c) for c in range(classes)])
    return {name: np.array(rows) for name, rows in out.items()}


def _close(actual: torch.Tensor, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=tolerance, atol=tolerance)


def _regression(outputs: torch.Tensor, noise_variance: torch.Tensor | float) -> RegressionPrediction:
    drawn = uq.Gaussian(1.0).from_blocks([outputs])
    return RegressionPrediction(drawn.mean, drawn.epistemic_variance, noise_variance)


def _streamed(logits: torch.Tensor, step: int) -> ClassPrediction:
    prediction = uq.Categorical().from_blocks(logits.split(step))
    assert isinstance(prediction, ClassPrediction)
    return prediction


@pytest.mark.parametrize("step", [None, 1, 3, 7], ids=lambda step: f"step {step}")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_classification_matches_the_definitions(
    dtype: torch.dtype, tolerance: float, step: int | None
) -> None:
    """Of all draws at once, and of draws that come in blocks."""
    logits = _logits(dtype)
    prediction = ClassPrediction.from_logits(logits) if step is None else _streamed(logits, step)
    expected = _by_hand(logits)
    _close(prediction.probs, expected["probs"], tolerance)
    _close(prediction.logits_mean, expected["mean"], tolerance)
    _close(prediction.logits_variance, expected["variance"], tolerance)
    _close(prediction.entropy(), expected["entropy"], tolerance)
    _close(prediction.expected_entropy(), expected["expected"], tolerance)
    _close(prediction.mutual_information(), expected["entropy"] - expected["expected"], tolerance)
    _close(prediction.scores()["epistemic_variance"], expected["variance"].mean(axis=1), tolerance)
    _close(prediction.max_probability(), expected["probs"].max(axis=1), tolerance)
    assert prediction.probs_variance is not None and prediction.votes is not None
    _close(prediction.probs_variance, expected["spread"], tolerance)
    assert prediction.votes.tolist() == expected["votes"].tolist()
    _close(prediction.variation_ratio(), 1 - expected["votes"].max(axis=1) / SAMPLES, tolerance)
    top = prediction.top_k(2)
    assert top.standard_deviations is not None
    order = np.argsort(-expected["probs"], axis=1)[:, :2]
    _close(top.standard_deviations, np.take_along_axis(expected["spread"], order, 1) ** 0.5, tolerance)
    assert prediction.predicted().tolist() == expected["probs"].argmax(axis=1).tolist()
    targets = torch.tensor([3, 0, 1, 2, 3])
    log_probs = np.log([expected["probs"][i, c] for i, c in enumerate(targets.tolist())])
    _close(prediction.log_prob(targets), log_probs, tolerance)
    assert {t.dtype for t in prediction.to_dict().values() if t.is_floating_point()} == {dtype}
    assert len(prediction) == BATCH


@pytest.mark.parametrize("trailing", [False, True])
def test_binary_is_two_class_softmax_of_zero_and_the_logit(trailing: bool) -> None:
    odds = _logits(torch.float64)[:, :, 0]
    logits = odds.unsqueeze(-1) if trailing else odds
    prediction = ClassPrediction.from_logits(logits, binary=True)
    expected = _by_hand(torch.stack([torch.zeros_like(odds), odds], dim=-1))
    _close(prediction.probs, expected["probs"], 1e-12)
    _close(prediction.entropy(), expected["entropy"], 1e-12)
    _close(prediction.expected_entropy(), expected["expected"], 1e-12)
    _close(prediction.logits_mean, expected["mean"][:, 1:], 1e-12)
    _close(prediction.epistemic_variance, expected["variance"][:, 1:], 1e-12)
    assert prediction.votes is not None and prediction.votes.tolist() == expected["votes"].tolist()
    _close(prediction.log_prob(torch.ones(BATCH, dtype=torch.int64)), np.log(expected["probs"][:, 1]), 1e-12)


def test_top_k_is_sorted_and_names_its_parts() -> None:
    prediction = ClassPrediction.from_logits(_logits())
    top = prediction.top_k(3)
    for i in range(BATCH):
        order = sorted(range(CLASSES), key=lambda c: -float(prediction.probs[i, c]))[:3]
        assert top.labels[i].tolist() == order
        assert top.probabilities[i].tolist() == [float(prediction.probs[i, c]) for c in order]


def test_one_sample_has_no_epistemic_part() -> None:
    prediction = ClassPrediction.from_logits(_logits()[:1])
    assert prediction.variation_ratio().eq(0).all()
    assert prediction.probs_variance is not None and prediction.probs_variance.eq(0).all()
    assert prediction.logits_variance.eq(0).all()
    assert prediction.mutual_information().eq(0).all()
    assert prediction.entropy().gt(0).all()


def test_probability_exactly_zero_gives_no_nan() -> None:
    logits = _logits()
    logits[..., 1] = -math.inf
    prediction, rest = _streamed(logits, 2), ClassPrediction.from_logits(logits[..., [0, 2, 3]])
    assert prediction.logits_mean[:, 1].eq(-math.inf).all()
    assert prediction.probs[:, 1].eq(0).all()
    torch.testing.assert_close(prediction.entropy(), rest.entropy())
    torch.testing.assert_close(prediction.expected_entropy(), rest.expected_entropy())
    of_rest = rest.scores()["epistemic_variance"]
    torch.testing.assert_close(prediction.scores()["epistemic_variance"], of_rest * 3 / 4)
    assert prediction.log_prob(torch.ones(BATCH, dtype=torch.int64)).eq(-math.inf).all()


def test_log_prob_survives_probabilities_that_underflow() -> None:
    prediction = _streamed(torch.tensor([[[0.0, 500.0]], [[0.0, 400.0]]]), 1)
    assert prediction.probs[0, 0] == 0
    # log((e^-500 + e^-400) / 2)
    expected = -400 + math.log1p(math.exp(-100)) - math.log(2)
    assert prediction.log_prob(torch.tensor([0])).item() == pytest.approx(expected, rel=1e-6)
    joined = ClassPrediction.cat([prediction, prediction])
    assert joined.log_prob(torch.tensor([0, 0]))[1].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_raised_to_float32_before_any_sum(dtype: torch.dtype) -> None:
    logits = _logits(dtype)
    prediction, expected = _streamed(logits, 2), _by_hand(logits)
    assert all(t.dtype == torch.float32 for t in prediction.to_dict().values() if t.is_floating_point())
    _close(prediction.probs, expected["probs"], 2e-5)
    _close(prediction.logits_variance, expected["variance"], 2e-5)
    regression = _regression(logits, 0.1)
    assert regression.mean.dtype == regression.variance.dtype == torch.float32
    _close(regression.epistemic_variance, expected["variance"], 2e-5)


def test_a_nan_stays_in_its_row() -> None:
    logits = _logits()
    logits[2, 1, 0] = math.nan
    values = _streamed(logits, 2).to_dict()
    for name, tensor in values.items():
        if name in ("predicted", "votes"):
            continue
        if name.startswith("logits"):  # only the logit itself
            assert tensor.isnan().nonzero().tolist() == [[1, 0]], name
        else:
            rows = tensor.isnan().reshape(BATCH, -1)
            assert rows.all(1).tolist() == rows.any(1).tolist() == [i == 1 for i in range(BATCH)], name


def test_a_masked_class_that_is_nan_once_is_nan() -> None:
    logits = _logits()
    logits[:, 0, 2] = -math.inf
    logits[4, 0, 2] = math.nan
    logits[1, 3, 1] = -math.inf  # masked by a single draw
    together, streamed = (_streamed(logits, step).to_dict() for step in (SAMPLES, 1))
    assert streamed["logits_mean"][0, 2].isnan() and streamed["logits_mean"][3, 1] == -math.inf
    for name, tensor in together.items():
        torch.testing.assert_close(streamed[name], tensor, equal_nan=True, atol=1e-6, rtol=1e-5)


def test_sums_are_as_good_as_two_passes() -> None:
    """Where a mean is large against the deviations, and in any grouping."""
    generator = torch.Generator().manual_seed(1)
    values = 1e4 + 1e-2 * torch.randn(50, 20, generator=generator, dtype=torch.float64)
    for step in (1, 7, 50):
        found = uq.Gaussian(1.0).from_blocks(values.split(step))
        _close(found.epistemic_variance, values.numpy().var(axis=0, ddof=1), 1e-9)
        np.testing.assert_allclose(found.mean.numpy(), values.numpy().mean(axis=0), rtol=1e-14)


def test_small_blocks_are_joined_up_to_a_size() -> None:
    blocks = [torch.full((1, 4), float(i)) for i in range(7)]  # 16 bytes each
    for limit, sizes in ((0, [1] * 7), (32, [2, 2, 2, 1]), (50, [3, 3, 1]), (10**6, [7])):
        found = list(gathered(iter(blocks), limit))
        assert [len(block) for block in found] == sizes
        assert torch.equal(torch.cat(found), torch.cat(blocks))


def test_a_head_without_samples_lacks_only_what_needs_them() -> None:
    probs = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    prediction = ClassPrediction(probs, torch.zeros(2, 1), torch.tensor([[2.0], [3.0]]))
    assert prediction.epistemic_variance.tolist() == [[2.0], [3.0]]
    _close(prediction.entropy(), np.array([_entropy([0.25, 0.75]), 0.0]), 1e-6)
    _close(prediction.log_prob(torch.tensor([0, 0])), np.array([math.log(0.25), 0.0]), 1e-6)
    assert prediction.top_k(1).standard_deviations is None
    assert set(prediction.to_dict()) == {*("probs", "logits_mean", "logits_variance", "predicted", "entropy")}


def test_what_cannot_be_computed_is_no_missing_value() -> None:
    class Broken(ClassPrediction):
        def entropy(self) -> torch.Tensor:
            raise PosthocUQError("entropy fails")

    with pytest.raises(PosthocUQError, match="entropy fails"):
        Broken(torch.full((2, 2), 0.5), torch.zeros(2, 2), torch.zeros(2, 2)).to_dict()


def test_mutual_information_is_never_negative() -> None:
    prediction = ClassPrediction(
        torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([math.log(2) + 1e-3])
    )
    assert prediction.mutual_information().item() == 0


def test_cat_and_to_keep_everything() -> None:
    logits = _logits()
    whole = ClassPrediction.from_logits(logits)
    parts = [ClassPrediction.from_logits(logits[:, :2]), ClassPrediction.from_logits(logits[:, 2:])]
    joined = ClassPrediction.cat(parts).to("cpu").to_dict()
    assert set(joined) == {
        *("probs", "logits_mean", "logits_variance", "predicted", "entropy"),
        *("expected_entropy", "mutual_information", "probs_variance", "votes", "variation_ratio"),
    }
    for name, tensor in whole.to_dict().items():
        torch.testing.assert_close(joined[name], tensor)
    bare = ClassPrediction(parts[0].probs, parts[0].logits_mean, parts[0].logits_variance)
    mixed = ClassPrediction.cat([bare, parts[1]])
    assert len(mixed) == BATCH
    assert mixed.sample_entropy is None and mixed.votes is None and mixed.probs_variance is None
    targets = torch.arange(BATCH) % CLASSES
    torch.testing.assert_close(mixed.log_prob(targets), whole.log_prob(targets))
    assert {t.device.type for t in whole.to("meta").to_dict().values()} == {"meta"}


@pytest.mark.parametrize("flat", [False, True])
def test_regression_matches_the_definitions(flat: bool) -> None:
    outputs = _logits(torch.float64)
    noise: torch.Tensor | float = 0.3 if flat else torch.tensor([0.1, 0.2, 0.3, 0.4])
    if flat:
        outputs = outputs[:, :, 0]
    prediction = _regression(outputs, noise)
    values = outputs.numpy().reshape(SAMPLES, BATCH, -1)
    width = values.shape[2]
    noises = [0.3] if flat else [0.1, 0.2, 0.3, 0.4]
    targets = _logits(torch.float64)[0, :, :width].numpy() + 0.5
    mean, spread, low, quantile = (np.empty((BATCH, width)) for _ in range(4))
    log_prob, epistemic = np.zeros(BATCH), np.zeros(BATCH)
    for i in range(BATCH):
        for o in range(width):
            mean[i, o] = sum(values[:, i, o]) / SAMPLES
            spread[i, o] = sum((v - mean[i, o]) ** 2 for v in values[:, i, o]) / (SAMPLES - 1)
            normal = NormalDist(mean[i, o], math.sqrt(spread[i, o] + noises[o]))
            low[i, o], quantile[i, o] = normal.inv_cdf(0.05), normal.inv_cdf(0.8)
            log_prob[i] += math.log(normal.pdf(targets[i, o]))
            epistemic[i] += spread[i, o] / width
    shape = tuple(outputs.shape[1:])
    lower, upper = prediction.interval(0.9)
    _close(prediction.mean, mean.reshape(shape), 1e-12)
    _close(prediction.epistemic_variance, spread.reshape(shape), 1e-12)
    _close(prediction.variance, (spread + noises).reshape(shape), 1e-7)
    _close(prediction.standard_deviation, np.sqrt(spread + noises).reshape(shape), 1e-7)
    _close(prediction.scores()["epistemic_variance"], epistemic, 1e-12)
    _close(lower, low.reshape(shape), 1e-7)
    _close(upper, (2 * mean - low).reshape(shape), 1e-7)
    _close(prediction.quantile(0.8), quantile.reshape(shape), 1e-7)
    _close(prediction.log_prob(torch.from_numpy(targets).reshape(shape)), log_prob, 1e-6)
    assert len(prediction) == BATCH
    assert prediction.noise_variance.shape == shape


def test_interval_stays_finite_next_to_one_and_single_sample_is_noise_only() -> None:
    prediction = _regression(torch.zeros(1, 3), 4.0)
    assert prediction.epistemic_variance.eq(0).all()
    lower, upper = prediction.interval(math.nextafter(1, 0))
    # the two-sided 2^-53 tail of a normal lies 8.29 standard deviations out
    torch.testing.assert_close(upper, torch.full((3,), 2 * -NormalDist().inv_cdf(2.0**-54)))
    torch.testing.assert_close(lower, -upper)


def test_regression_cat_and_to_keep_everything() -> None:
    outputs = _logits()
    parts = [
        _regression(outputs[:, :2], 0.1),
        _regression(outputs[:, 2:], 0.2),
    ]
    joined = RegressionPrediction.cat(parts)
    assert set(joined.to_dict()) == {"mean", "epistemic_variance", "noise_variance", "variance"}
    for name, tensor in joined.to("cpu").to_dict().items():
        torch.testing.assert_close(tensor, torch.cat([part.to_dict()[name] for part in parts]))
    assert {t.device.type for t in joined.to("meta").to_dict().values()} == {"meta"}


def test_regression_samples_follow_the_predictive_gaussian() -> None:
    mean, epistemic = torch.tensor([[1.0, -2.0], [0.0, 5.0]]), torch.tensor([[0.5, 0.0], [2.0, 1.0]])
    prediction = RegressionPrediction(mean, epistemic, torch.tensor([0.5, 0.25]))
    before = torch.get_rng_state()
    drawn = prediction.sample(40_000, torch.Generator().manual_seed(0))
    assert drawn.shape == (40_000, 2, 2)
    total = np.array([[1.0, 0.25], [2.5, 1.25]])
    error = 5 * np.sqrt(total / 40_000)  # five standard errors
    assert (np.abs(drawn.double().mean(0).numpy() - mean.numpy()) < error).all()
    np.testing.assert_allclose(drawn.double().var(0).numpy(), total, rtol=5 * math.sqrt(2 / 40_000))
    flat = drawn.double().reshape(-1, 4).T
    assert (torch.corrcoef(flat) - torch.eye(4)).abs().max() < 0.025
    for q in (0.1, 0.9):
        share = (drawn < prediction.quantile(q)).double().mean(0)
        assert (share - q).abs().max() < 0.01
    assert torch.equal(
        prediction.sample(3, torch.Generator().manual_seed(1)),
        prediction.sample(3, torch.Generator().manual_seed(1)),
    )
    assert not torch.equal(prediction.sample(3), prediction.sample(3))
    assert torch.equal(before, torch.get_rng_state())


def test_a_nan_stays_with_its_output() -> None:
    outputs = _logits()
    outputs[3, 2, 1] = math.nan
    prediction = _regression(outputs, 0.1)
    low, high = prediction.interval(0.5)
    sample = prediction.sample(2)[1]
    for tensor in (prediction.mean, prediction.variance, low, high, prediction.quantile(0.2), sample):
        assert tensor.isnan().nonzero().tolist() == [[2, 1]]
    assert prediction.log_prob(torch.zeros(BATCH, CLASSES)).isnan().tolist() == [i == 2 for i in range(BATCH)]


def test_repr_is_short() -> None:
    assert repr(ClassPrediction.from_logits(_logits())) == "ClassPrediction(inputs=5, classes=4)"
    assert repr(_regression(_logits(), 0.1)) == ("RegressionPrediction(inputs=5, outputs=4)")


OF_ALL = (
    "answers cat entropy epistemic_variance familiarity kind log_prob novelty outputs_mean picked promises quality "
    "scores to to_dict"
)
OF_CLASSES = (
    "classes expected_entropy from_logits log_probs logits_mean logits_variance max_probability mutual_information "
    "predicted probs probs_variance sample_entropy set top_k variation_ratio votes"
)
OF_VALUES = "classes interval mean noise_variance normal quantile sample standard_deviation variance"
OF_HEADS = (
    "at device functional_covariance functional_mean functional_samples functional_variance head model novelty "
    "posterior predict predictive_samples promises to"
)


def test_dir_shows_what_users_call() -> None:
    own = {*OF_ALL.split()}
    prediction, values = ClassPrediction.from_logits(_logits()), _regression(_logits(), 0.1)
    assert {*dir(prediction)} == own | {*OF_CLASSES.split()}
    assert {*dir(values)} == own | {*OF_VALUES.split()}
    model = torch.nn.Linear(3, 4)
    posterior = uq.fit(model, [torch.randn(8, 3)], prior_precision=1.0, progress=False)
    shown = {*dir(uq.wrap(model, posterior))}
    assert shown > {*OF_HEADS.split()} and shown & {*dir(torch.nn.Module())} == {"to"}
    assert not shown & {"closed_form", "distribution", "features", "held", "hyperparameters", "identity"}
    shown = {*dir(posterior)}
    assert shown > {"with_settings", "report", "sample", "variance", "history", "prior_precision"}
    assert not shown & {"at", "replaced", "noted", "with_blocks", "occam_factor", "block_settings"}


class Guess(uq.Prediction):
    """Of a user's: one number an input, and nothing else."""

    kind, default_score, loss_name = "guesses", "distance", "error"


@dataclass(frozen=True, eq=False, repr=False)
class Signs(Guess):
    mean: Annotated[torch.Tensor, "batch"]

    @property
    def outputs_mean(self) -> torch.Tensor:
        return self.mean

    def log_prob(self, targets: torch.Tensor) -> torch.Tensor:
        return -self.losses(targets)

    def fitting(self, targets: torch.Tensor) -> torch.Tensor:
        return targets

    def scores(self) -> dict[str, torch.Tensor]:
        return {"distance": self.mean.abs()}

    def quality(self, targets: torch.Tensor, bins: int = 15) -> dict[str, float]:
        return {"error": float(self.losses(targets).mean())}

    def losses(self, targets: torch.Tensor) -> torch.Tensor:
        return (self.mean - targets).abs()

    def tensors(self) -> Any:
        return (self.mean,)


def test_a_prediction_of_the_users_answers_by_default() -> None:
    prediction = Signs(torch.tensor([1.0, -2.0, 3.0]))
    targets = torch.tensor([1.0, 1.0, 1.0])
    assert prediction.answers(names=["a", "b"]) == [{"mean": 1.0}, {"mean": -2.0}, {"mean": 3.0}]
    assert prediction.target_scores(targets, "lac", torch.zeros(3, dtype=torch.int64)) is None
    assert prediction.mistakes(targets) is None and prediction.categories is None
    assert prediction.unshifted() is prediction and "mean" in dir(prediction)
    assert len(uq.Prediction.cat([prediction, prediction.picked(slice(1))])) == 4
    named = ClassPrediction.from_logits(_logits())
    first = named.answers(top_k=2, names="abcd")[0]
    assert (
        first["prediction"] == "abcd"[first["index"]] == first["top"][0]["label"] and len(first["top"]) == 2
    )
