"""Every metric against loops in float64 written from its definition, quadrature, all orders of ties, scikit-learn."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve, top_k_accuracy_score
from torch import Tensor

from posthoc_uq.evaluation import metrics


def classified(inputs: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores without ties, probs, labels."""
    generator = torch.Generator().manual_seed(10 * inputs + classes)
    probs = (2 * torch.randn(inputs, classes, dtype=torch.float64, generator=generator)).softmax(dim=-1)
    labels = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    entropy = -(probs * probs.log()).sum(dim=-1)
    return entropy + 0.2 * torch.randn(inputs, dtype=torch.float64, generator=generator), probs, labels


class TestClasses:
    def test_scores_match_the_definitions(self) -> None:
        _, probs, labels = classified(200, 5)
        pairs = list(zip(probs.tolist(), labels.tolist(), strict=True))
        hits = [row.index(max(row)) == label for row, label in pairs]
        brier = [sum((p - (c == label)) ** 2 for c, p in enumerate(row)) for row, label in pairs]
        assert metrics.accuracy(probs, labels) == pytest.approx(sum(hits) / 200, abs=1e-6)
        assert metrics.brier_score(probs, labels) == pytest.approx(sum(brier) / 200, abs=1e-12)
        for k in (1, 2, 4):
            expected = top_k_accuracy_score(labels.numpy(), probs.numpy(), k=k, labels=range(5))
            assert metrics.top_k_accuracy(probs, labels, k) == pytest.approx(expected, abs=1e-12)

    def test_top_k_of_equal_probabilities_takes_the_first_classes(self) -> None:
        probs = torch.tensor([[0.7, 0.3, 0.0, 0.0]]).repeat(4, 1)
        found = [metrics.top_k_accuracy(probs, torch.arange(4), k) for k in (1, 2, 3, 4)]
        assert found == [0.25, 0.5, 0.75, 1]

    def test_edge_probabilities(self) -> None:
        sure = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        right, wrong = torch.tensor([0, 1]), torch.tensor([1, 0])
        assert (metrics.brier_score(sure, right), metrics.brier_score(sure, wrong)) == (0, 2)


def equal_width(values: list[float], hits: list[float], bins: int) -> float:
    inside = {b: [i for i, v in enumerate(values) if min(int(v * bins), bins - 1) == b] for b in range(bins)}
    return sum(abs(sum(hits[i] - values[i] for i in members)) for members in inside.values()) / len(values)


def equal_mass(values: list[float], hits: list[float], bins: int) -> float:
    """Bins filled one after the other; an input that ties with the one before it joins that one's bin."""
    order = sorted(range(len(values)), key=values.__getitem__)
    filled: dict[int, list[int]] = {}
    current = 0
    for place, i in enumerate(order):
        if place == 0 or values[i] > values[order[place - 1]]:
            current = math.floor(bins * place / len(values))
        filled.setdefault(current, []).append(i)
    return sum(abs(sum(hits[i] - values[i] for i in inside)) for inside in filled.values()) / len(values)


class TestCalibration:
    @pytest.mark.parametrize("bins", [1, 10, 300])
    @pytest.mark.parametrize("digits", [1, 12])
    @pytest.mark.parametrize(
        ("binning", "expected"), [("equal_width", equal_width), ("equal_mass", equal_mass)]
    )
    def test_errors_and_bins(self, bins, digits, binning, expected) -> None:
        _, probs, labels = classified(200, 5)
        probs = probs.round(decimals=digits) + (1e-9 if digits == 1 else 0)  # off the edges
        confidence, hits = probs.max(-1).values.tolist(), (probs.argmax(-1) == labels).double().tolist()
        found = metrics.expected_calibration_error(probs, labels, bins, binning)
        assert found == pytest.approx(expected(confidence, hits, bins), abs=1e-6)
        parts = metrics.calibration_bins(probs, labels, bins, binning)
        gaps = (parts.accuracy - parts.confidence).abs().nan_to_num() * parts.counts / 200
        assert gaps.sum().item() == pytest.approx(found, abs=1e-6) and parts.counts.sum() == 200
        if binning == "equal_mass" and digits == 12:
            assert parts.counts.max() - parts.counts.min() <= 1
        columns = [expected(probs[:, c].tolist(), (labels == c).double().tolist(), bins) for c in range(5)]
        classwise = metrics.classwise_calibration_error(probs, labels, bins, binning)
        assert classwise == pytest.approx(sum(columns) / 5, abs=1e-6)
        shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(0))
        again = metrics.expected_calibration_error(probs[shuffled], labels[shuffled], bins, binning)
        assert again == pytest.approx(found, abs=1e-6)

    def test_the_edges_of_bins(self) -> None:
        # one input at 1 and wrong, one at 0.97 and right: |(1 + 0.97) / 2 - 1 / 2| together, 0.515 if parted
        probs = torch.tensor([[1.0, 0.0], [0.97, 0.03]])
        found = metrics.expected_calibration_error(probs, torch.tensor([1, 0]))
        assert found == pytest.approx(0.485, abs=1e-6)
        # the wrong 0.5 shares a bin with the right 0.75; in the bin below it would add 0.25 + 0.125
        probs, labels = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.25, 0.0]]), torch.tensor([1, 0])
        assert metrics.calibration_bins(probs, labels, 2).counts.tolist() == [0, 2]
        assert metrics.expected_calibration_error(probs, labels, 2) == pytest.approx(0.125, abs=1e-6)
        # a rounding above one is still a probability
        probs = torch.tensor([[1.0 + 2e-7, 0.0], [1.0, 0.0]])
        assert metrics.expected_calibration_error(probs, torch.tensor([0, 0])) == pytest.approx(0, abs=1e-6)


class TestValues:
    @pytest.mark.parametrize("shape", [(400,), (200, 2)])
    def test_scores_match_the_definitions(self, shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(7)
        mean, noise = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
        variance = torch.rand(shape, dtype=torch.float64, generator=generator) + 0.2
        targets = mean + 0.3 + 1.4 * variance.sqrt() * noise
        flat = list(zip(*(t.flatten().tolist() for t in (mean, variance, targets)), strict=True))
        lower, upper = mean - variance, mean + variance
        density = sum(math.log(NormalDist(m, math.sqrt(v)).pdf(y)) for m, v, y in flat) / shape[0]
        for found, expected in (
            (metrics.rmse(mean, targets), math.sqrt(sum((m - y) ** 2 for m, _, y in flat) / 400)),
            (metrics.gaussian_log_density(mean, variance, targets), density),
            (
                metrics.interval_coverage(lower, upper, targets),
                sum(abs(m - y) <= v for m, v, y in flat) / 400,
            ),
            (metrics.interval_sharpness(lower, upper), 2 * sum(v for _, v, _ in flat) / 400),
        ):
            assert found == pytest.approx(expected, abs=1e-9)

        levels, standard = [0.9, 0.05, 0.5], NormalDist()
        inside = metrics.coverage_curve(mean, variance, targets, levels)
        below = metrics.coverage_curve(mean, variance, targets, torch.tensor(levels), kind="quantile")
        for k, level in enumerate(levels):
            half, quantile = standard.inv_cdf((1 + level) / 2), standard.inv_cdf(level)
            within = sum(abs(y - m) <= half * math.sqrt(v) for m, v, y in flat) / 400
            under = sum(y <= m + quantile * math.sqrt(v) for m, v, y in flat) / 400
            assert inside.observed[k].item() == pytest.approx(within, abs=1e-12)
            assert below.observed[k].item() == pytest.approx(under, abs=1e-12)
        gaps = [abs(o - n) for o, n in zip(inside.observed.tolist(), levels, strict=True)]
        assert inside.error == pytest.approx(sum(gaps) / 3) and inside.error > 0.03

    def test_crps_is_the_integral_over_squared_distribution_functions(self) -> None:
        cases = [(0.3, 2.0, 1.1), (-1.0, 0.04, -3.0), (5.0, 9.0, 5.0), (0.0, 1.0, 9.0)]
        integrals = []
        for mean, variance, target in cases:
            normal = NormalDist(mean, math.sqrt(variance))
            below = quad(lambda x, n=normal: n.cdf(x) ** 2, -60, target, points=[mean], limit=200)[0]
            above = quad(lambda x, n=normal: (1 - n.cdf(x)) ** 2, target, 60, points=[mean], limit=200)[0]
            integrals.append(below + above)
        columns = torch.tensor(cases, dtype=torch.float64).T.reshape(3, 2, 2)
        assert metrics.crps_gaussian(*columns) == pytest.approx(sum(integrals) / 4, abs=1e-7)

    def test_without_variance(self) -> None:
        mean, target = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.5, 2.0, 0.0])
        assert metrics.crps_gaussian(mean, torch.zeros(3), target) == pytest.approx(3.5 / 3)
        certain = torch.zeros(4), torch.zeros(4), torch.tensor([0.0, 0.0, 1.0, -1.0])
        assert metrics.coverage_curve(*certain).observed.tolist() == [0.5] * 19
        below = metrics.coverage_curve(*certain, [0.2, 0.5], kind="quantile")
        assert below.observed.tolist() == [0.25, 0.75]


class TestForeignInputs:
    @pytest.mark.parametrize("scale", [0.1, 1e6])
    @pytest.mark.parametrize("size", [30, 300])
    def test_by_scikit_learn_at_any_scale_with_ties(self, scale: float, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        inside = torch.randint(0, 20, (400,), generator=generator) * scale
        outside = torch.randint(8, 30, (size,), generator=generator) * scale
        outside[0] = math.inf
        scores = torch.cat([inside, outside]).clamp(max=1e9).numpy()
        foreign = np.arange(len(scores)) >= 400
        assert metrics.ood_auroc(inside, outside) == pytest.approx(roc_auc_score(foreign, scores), abs=1e-6)
        precision = average_precision_score(foreign, scores)
        assert metrics.ood_aupr(inside, outside) == pytest.approx(precision, abs=1e-6)
        false, true, _ = roc_curve(foreign, scores, drop_intermediate=False)
        for tpr in (0.5, 0.8, 0.9, 0.95, 1.0):
            assert metrics.ood_fpr(inside, outside, tpr) == pytest.approx(false[true >= tpr - 1e-12].min())

    def test_edges(self) -> None:
        one, two = torch.tensor([1.0]), torch.tensor([2.0, math.inf])
        assert [metrics.ood_auroc(*pair) for pair in ((one, two), (two, one), (one, one))] == [1, 0, 0.5]
        # 0.07 of 100 is 7.000000000000001 in floating point: seven have to be caught, not eight
        assert metrics.ood_fpr(torch.tensor([93.0, 92.0]), torch.arange(100.0), 0.07) == 0.5
        # scores that all tie are flagged together
        assert metrics.ood_fpr(torch.ones(3), torch.ones(5)) == 1


def risks(scores: list[float], losses: list[float]) -> list[float]:
    """By retaining the inputs one after the other, in the order they come among equals."""
    order = sorted(range(len(scores)), key=scores.__getitem__)
    return [sum(losses[i] for i in order[:k]) / k for k in range(1, len(scores) + 1)]


class TestSelectivePrediction:
    def test_risk_coverage(self) -> None:
        scores, probs, labels = classified(60, 4)
        losses = -probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()
        curve = metrics.risk_coverage(scores, losses)
        expected = risks(scores.tolist(), losses.tolist())
        np.testing.assert_allclose(curve.risk, expected, atol=1e-12)
        np.testing.assert_allclose(curve.coverage, np.arange(1, 61) / 60)
        assert curve.thresholds.tolist() == sorted(scores.tolist())
        assert curve.area == pytest.approx(sum(expected) / 60)
        infinite = metrics.risk_coverage(
            torch.tensor([math.inf, 0.0, -math.inf]), torch.tensor([3.0, 0.0, 0.0])
        )
        assert infinite.risk.tolist() == [0, 0, 1]

    def test_with_ties_it_is_the_mean_over_all_orders(self) -> None:
        scores, losses = [1.0, 1.0, 0.0, 2.0, 1.0, 2.0], [1.0, 0.0, 0.5, 0.0, 2.0, 1.0]
        orders = itertools.permutations(range(6))
        curves = [risks([scores[i] for i in order], [losses[i] for i in order]) for order in orders]
        curve = metrics.risk_coverage(torch.tensor(scores), torch.tensor(losses))
        np.testing.assert_allclose(curve.risk, np.mean(curves, axis=0), atol=1e-12)
        assert min(map(np.mean, curves)) < curve.area - 0.05, "some orders are luckier"

    def test_accuracy_on_what_remains(self) -> None:
        scores, probs, labels = classified(40, 3)
        hits = (probs.argmax(-1) == labels).tolist()
        order = sorted(range(40), key=scores.tolist().__getitem__)
        expected = [np.mean([hits[i] for i in order[:kept]]) for kept in (40, 36, 27, 20, 1, 1)]
        found = metrics.selective_accuracy(scores, probs, labels, [0.0, 0.1, 0.33, 0.5, 0.975, 0.99])
        np.testing.assert_allclose(found, expected, atol=1e-12)
        every = metrics.selective_accuracy(scores, probs, labels, [k / 40 for k in range(40)])
        assert metrics.selective_accuracy_area(scores, probs, labels) == pytest.approx(every.mean().item())

    def test_rates_that_went_through_float32_mean_what_they_say(self) -> None:
        probs = torch.tensor([[0.9, 0.1]]).repeat(1000, 1)
        scores, labels = torch.arange(1000.0), (torch.arange(1000) >= 300).long()
        # 0.7 in float32 is 0.69999999: still 700 of the 1000 go, and the 300 that are right remain
        for rates in (torch.tensor([0.7]), [0.29 + 0.41]):
            assert metrics.selective_accuracy(scores, probs, labels, rates).tolist() == [1.0]

    def test_auc_of_two_and_of_many_classes(self) -> None:
        scores, probs, labels = classified(200, 2)
        order = scores.argsort()
        kept = [order[:count] for count in (200, 150, 100, 20)]
        expected = [roc_auc_score(labels[k], probs[k, 1]) for k in kept]
        found = metrics.selective_auc(scores, probs, labels, [0.0, 0.25, 0.5, 0.9])
        np.testing.assert_allclose(found, expected, atol=1e-12)

        scores, probs, labels = classified(200, 4)
        scores[labels == 3] += 100  # referred first
        left = scores.argsort()[:100]
        whole, half = metrics.selective_auc(scores, probs, labels, [0.0, 0.5]).tolist()
        assert whole == pytest.approx(roc_auc_score(labels, probs, multi_class="ovr"), abs=1e-12)
        by_class = [roc_auc_score(labels[left] == c, probs[left, c]) for c in range(3)]
        assert half == pytest.approx(np.mean(by_class), abs=1e-12)
        one_class = metrics.selective_auc(torch.arange(3.0), probs[:3, :2], torch.tensor([1, 1, 0]), [0.4])
        assert math.isnan(one_class[0])

    def test_auc_retains_ties_at_the_border_in_part(self) -> None:
        scores, probs, labels = classified(120, 2)
        scores, probs = scores.round(decimals=0), probs.round(decimals=1)  # the probabilities tie as well
        value = metrics.selective_auc(scores, probs, labels, [0.5]).item()
        border = scores.sort().values[59]
        weight = torch.where(scores < border, 1.0, 0.0)
        weight[scores == border] = ((60 - weight.sum()) / (scores == border).sum()).item()
        assert 0 < weight[scores == border][0] < 1
        assert value == pytest.approx(roc_auc_score(labels, probs[:, 1], sample_weight=weight), abs=1e-6)


def scores_of(inputs: int, ties: bool, seed: int = 0) -> dict[str, Tensor]:
    """Three scores of other scales and shapes, two of them correlated."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(3, inputs, generator=generator, dtype=torch.float64)
    normal[1] += normal[0]
    if ties:
        normal = (2 * normal).round() / 2
    return {"a": normal[0], "b": (3 * normal[1]).exp(), "c": 1e-3 * normal[2]}


def counted_share(familiar: Tensor, value: float) -> float:
    return sum(v >= value for v in familiar.tolist()) / len(familiar)


class TestThresholds:
    @pytest.mark.parametrize("ties", [False, True])
    def test_is_the_smallest_that_keeps_the_rate(self, ties: bool) -> None:
        scores = scores_of(50, ties)["a"]
        for rate in (0.0, 0.05, 0.1, 0.29, 0.5, 0.98):
            threshold = metrics.referral_threshold(scores, rate)
            # the share changes at scores only, so the smallest threshold is one of them
            fitting = [t for t in scores.tolist() if sum(s > t for s in scores.tolist()) <= rate * 50 + 1e-9]
            assert threshold == min(fitting)
        assert metrics.referral_threshold(scores, 1.0) == -math.inf


class TestTails:
    @pytest.mark.parametrize("ties", [False, True])
    def test_all_inputs_are_counted(self, ties: bool) -> None:
        values = scores_of(60, ties)["b"]
        tail = metrics.tail_of(values)
        expected = [counted_share(values, float(v)) for v in values]
        assert metrics.tail_probability(tail, values).tolist() == pytest.approx(expected, abs=1e-12)
        joint = metrics.joint_tail(scores_of(60, ties), scores_of(60, ties))
        shares = [[counted_share(v, float(v[i])) for v in scores_of(60, ties).values()] for i in range(60)]
        assert joint.tolist() == pytest.approx([-math.log(min(row)) for row in shares], abs=1e-12)

    def test_linear_interpolation_and_the_ends(self) -> None:
        tail = metrics.tail_of(torch.tensor([4.0, 0.0, 1.0, 1.0]))
        assert tail.values.tolist() == [4.0, 1.0, 1.0, 0.0] and tail.shares.tolist() == [0.25, 0.5, 0.75, 1.0]
        scores = torch.tensor([math.inf, 4.1, 4.0, 2.5, 1.0, 0.5, 0.0, -9.0, -math.inf, math.nan])
        found = metrics.tail_probability(tail, scores).tolist()
        assert found[:-1] == pytest.approx([0, 0, 0.25, 0.375, 0.75, 0.875, 1, 1, 1])
        assert math.isnan(found[-1])

    @pytest.mark.parametrize("inputs", [3, 201, 100_000])
    def test_kept_quantiles_are_exact_at_the_top_and_close_below(self, inputs: int) -> None:
        values = torch.randn(inputs, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        tail = metrics.tail_of(values, 200)
        assert len(tail.values) == len(tail.shares) == min(inputs, 200)
        assert bool((tail.shares.diff() > 0).all()) and tail.shares[-1] == 1
        ranks = (tail.shares * inputs).round().long()
        assert torch.equal(tail.values, values.sort(descending=True).values[ranks - 1])
        exact = metrics.tail_probability(metrics.tail_of(values), values)
        found = metrics.tail_probability(tail, values)
        top = exact <= 100 / inputs
        assert torch.allclose(found[top], exact[top], atol=1e-12, rtol=0)
        # a step from rank 100 skips at most 7, whose places on the line vary by about sqrt(7) / 2
        assert torch.allclose(found, exact, rtol=0.04, atol=0), "relatively, however small the share"

    def test_beyond_the_familiar_the_joint_score_goes_on_as_a_line(self) -> None:
        values = torch.arange(100, dtype=torch.float64)  # the largest is 99; ten are 90 or more
        slope = math.log(10) / 9
        scores = torch.tensor([99.0, 99.0 + 1e-13, 100.0, 150.0, 1e30, math.inf], dtype=torch.float64)
        found = metrics.joint_tail({"a": values}, {"a": scores}).tolist()
        expected = [math.log(100) + slope * (float(score) - 99) for score in scores]
        assert found == pytest.approx(expected, rel=1e-12)
        assert found == sorted(found) and len(set(found)) == 6, "every step upwards counts"
        other = metrics.joint_tail({"a": 5 * values - 3}, {"a": 5 * scores - 3})
        assert other.tolist() == pytest.approx(found, rel=1e-9), "the units do not matter"
        same = metrics.joint_tail({"a": torch.ones(7)}, {"a": torch.tensor([0.5, 1.0, 1.5])})
        assert same.tolist() == [0.0, 0.0, math.inf]

    def test_two_scores_find_what_either_misses(self) -> None:
        generator = torch.Generator().manual_seed(5)
        familiar = torch.randn(2, 2000, generator=generator)
        foreign = torch.randn(2, 400, generator=generator)
        foreign[0, :200] += 5
        foreign[1, 200:] += 5
        inside, outside = ({"a": rows[0], "b": rows[1]} for rows in (familiar, foreign))
        joint = metrics.ood_auroc(metrics.joint_tail(inside, inside), metrics.joint_tail(inside, outside))
        alone = [metrics.ood_auroc(inside[name], outside[name]) for name in inside]
        assert joint > 0.99 and max(alone) < 0.8


def test_every_public_name_is_there() -> None:
    assert all(hasattr(metrics, name) for name in metrics.__all__)


class TestExcessRiskOfTheTargetCoverage:
    """Against the coverage that is missing by definition, ``E max(0, level - P(covered | features))``."""

    @staticmethod
    def drawn(generator: torch.Generator, inputs: int = 500) -> dict[str, Tensor]:
        score = torch.rand(inputs, dtype=torch.float64, generator=generator)
        other = 0.6 * score + 0.4 * torch.rand(inputs, dtype=torch.float64, generator=generator)
        classes = torch.randint(6, (inputs,), generator=generator)
        return {"score": score, "other": other, "class": classes}

    def test_a_promise_that_holds_everywhere_hardly_ever_seems_to_fail(self) -> None:
        generator, level, held_out = torch.Generator().manual_seed(0), 0.9, 200
        found = []
        for _ in range(200):  # each with held-out scores of its own
            features = self.drawn(generator, 300)
            kept = torch.rand(held_out, dtype=torch.float64, generator=generator).sort().values
            threshold = kept[math.ceil((held_out + 1) * level) - 1]
            covered = torch.rand(300, dtype=torch.float64, generator=generator) <= threshold
            found.append(metrics.coverage_excess_risk(covered, level, features, held_out=held_out))
        assert (
            sum(risk.fails for risk in found) <= 12
        )  # 2 % by the normal distribution; 5 % of 200 draws is 10 +- 3
        assert abs(np.mean([risk.value for risk in found])) < 0.006
        assert np.std([risk.value for risk in found]) < 1.3 * np.mean([risk.error for risk in found])

    @pytest.mark.parametrize("where", ["tail", "class", "both"])
    def test_coverage_that_some_inputs_miss(self, where) -> None:
        generator, level, found = torch.Generator().manual_seed(1), 0.9, []
        for _ in range(10):
            features = self.drawn(generator, 1000)
            group = {"tail": features["score"] > 0.8, "class": features["class"] == 2}
            failing = group["tail"] | group["class"] if where == "both" else group[where]
            p = torch.where(failing, 0.65, 0.95).double()
            missing = float((level - p).clamp(min=0).mean())
            covered = torch.rand(1000, dtype=torch.float64, generator=generator) < p
            risk = metrics.coverage_excess_risk(covered, level, features)
            assert risk.fails and risk.value < missing + 3 * risk.error
            found.append(risk.value / missing)
        assert 0.8 < np.mean(found) < 1.05

    def test_needs_no_order_of_its_inputs_and_takes_several_entries_of_one(self) -> None:
        features = self.drawn(torch.Generator().manual_seed(2))
        covered = torch.where(features["score"] > 0.8, 0.0, 1.0)
        risk, order = metrics.coverage_excess_risk(covered, 0.9, features), torch.randperm(500)
        shuffled = {name: values[order] for name, values in features.items()}
        assert metrics.coverage_excess_risk(covered[order], 0.9, shuffled) == pytest.approx(risk, abs=1e-12)
        assert risk.value == pytest.approx(0.9 * float((features["score"] > 0.8).double().mean()), abs=0.01)
        twice = {name: values.repeat(2) for name, values in features.items()}
        inputs = torch.arange(500).repeat(2)
        again = metrics.coverage_excess_risk(covered.repeat(2), 0.9, twice, inputs=inputs)
        assert again.error == pytest.approx(risk.error, rel=0.1)  # repeated entries tell nothing new
        assert metrics.coverage_excess_risk(torch.ones(500), 0.9, features) == (0, 0)
        assert metrics.coverage_excess_risk(torch.ones(500), 0.9, features, held_out=20).fails is False
