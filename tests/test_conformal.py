"""Promises by ranks of held-out scores, against their definitions, and their coverage on exchangeable scores."""

from __future__ import annotations

import math

import pytest
import torch

from posthoc_uq import PosthocUQError
from posthoc_uq.likelihoods import (
    HeldOutScores,
    class_scores,
    held_out_scores,
    joint_score,
    quantile,
    set_of,
    tail_of,
    tuned_regularisation,
)
from posthoc_uq.likelihoods.conformal import MAX_KEPT, Regularisation, p_values


def test_quantile_and_p_value_by_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 9, 10, 57, 150, 4096):
        values = torch.randn(count, generator=generator, dtype=torch.float64).round(decimals=2)  # with ties
        kept = held_out_scores(values)
        ordered = sorted(values.tolist())
        for level in (0.01, 0.3, 0.5, 0.9, 0.95, 0.999):
            rank = math.ceil(round((count + 1) * level, 6))
            if rank <= count:
                assert quantile(kept, level) == ordered[rank - 1]
            else:
                needed = next(n for n in range(1, 10**4) if math.ceil(round((n + 1) * level, 6)) <= n)
                with pytest.raises(PosthocUQError, match=f"needs {needed} held-out") as refused:
                    quantile(kept, level)
                quantile(kept, float(str(refused.value).split("at most ")[1].split(",")[0]))  # the way out
        new = torch.cat(
            (values[:20], torch.randn(20, generator=generator), torch.tensor([math.inf, -math.inf]))
        )
        expected = [(1 + sum(old >= score for old in ordered)) / (count + 1) for score in new.tolist()]
        assert p_values(kept, new).tolist() == expected
        assert HeldOutScores(**kept.plain()) == kept and len(kept.ranks) == len(kept.values)
    assert p_values(kept, torch.tensor([math.nan])).isnan().all()


def test_thinned_scores_are_conservative_within_a_step() -> None:
    values = torch.randn(30_011, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept, ordered = held_out_scores(values), values.sort().values
    count = len(values)
    assert len(kept.values) == MAX_KEPT and kept.values[-1] == ordered[-1] and int(kept.ranks[-1]) == count
    for level in (1e-5, 0.1, 0.5, 0.9, 0.99, 0.9999):
        rank = math.ceil((count + 1) * level)
        found = int((ordered <= quantile(kept, level)).sum())
        assert rank <= found <= rank + count / MAX_KEPT + 1
    new = torch.linspace(-5, 5, 301, dtype=torch.float64)
    exact = (1 + (values >= new[:, None]).sum(1)).double() / (count + 1)
    assert bool((p_values(kept, new) >= exact).all())
    assert float((p_values(kept, new) - exact).max()) <= 1 / MAX_KEPT + 1e-4


@pytest.mark.parametrize("kind", ["lac", "aps", "raps"])
def test_sets_against_a_loop_from_the_papers(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    probs = (2 * torch.randn(40, 9, generator=generator, dtype=torch.float64)).softmax(-1)
    uniform, threshold, penalty, free = torch.rand(40, generator=generator), 0.8, 0.03, 2
    scores = class_scores(probs, kind, uniform, Regularisation(penalty=penalty, free_classes=free))
    expected = torch.zeros(40, 9, dtype=torch.bool)
    for row in range(40):
        for label in range(9):
            p = probs[row].tolist()
            if kind == "lac":
                score = 1 - p[label]
            else:
                above = sum(other for other in p if other > p[label])
                score = above + (1 - float(uniform[row])) * p[label]
                if kind == "raps":
                    score += penalty * max(0, 1 + sum(other > p[label] for other in p) - free)
            expected[row, label] = score <= threshold
            assert abs(score - float(scores[row, label])) < 1e-12
    assert torch.equal(set_of(probs, scores, threshold, allow_empty=True), expected)
    filled = set_of(probs, scores, -1.0)
    assert torch.equal(filled.nonzero()[:, 1], probs.argmax(-1))
    assert not bool(set_of(probs, scores, -1.0, allow_empty=True).any())
    unknown = torch.full((1, probs.shape[1]), math.nan)
    assert bool(set_of(unknown, class_scores(unknown, kind), 0.5).all())


def test_the_penalty_of_raps_makes_the_smallest_sets() -> None:
    """By a loop from the definition; unclear probabilities ask for a larger penalty than clear ones."""
    generator, found = torch.Generator().manual_seed(5), list[Regularisation]()
    for scale in (0.3, 3.0):
        logits = scale * torch.randn(200, 30, generator=generator, dtype=torch.float64)
        probs = logits.softmax(-1)
        labels = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        uniform = torch.rand(200, generator=generator, dtype=torch.float64)
        found.append(tuned_regularisation(probs, labels, uniform))
        place = math.ceil(0.9 * 201)
        ranks = sorted(1 + int((row > row[label]).sum()) for row, label in zip(probs, labels, strict=True))
        assert found[-1].free_classes == ranks[place - 1]
        sizes = {}
        for penalty in (0.001, 0.01, 0.1, 0.2, 0.5):
            scores = class_scores(
                probs, "raps", uniform, Regularisation(penalty=penalty, free_classes=ranks[place - 1])
            )
            own = sorted(float(row[label]) for row, label in zip(scores, labels, strict=True))
            sizes[penalty] = sum(max(1, int((row <= own[place - 1]).sum())) for row in scores)
        assert sizes[found[-1].penalty] == min(sizes.values()) <= sizes[0.001]


@pytest.mark.parametrize("count", [19, 100, 1000])
def test_coverage_over_random_splits_of_one_table(count: int) -> None:
    """Mean coverage is in [level, level + 1 / (n + 1)] and p-values are super-uniform, within 4 standard errors."""
    generator, splits, new = torch.Generator().manual_seed(count), 200, 500
    table = torch.randn(count + new, generator=generator, dtype=torch.float64).exp()
    for miss in (0.01, 0.05, 0.1, 0.2):
        if count < 1 / miss - 1:
            continue
        covered, small = list[float](), list[float]()
        for _ in range(splits):
            order = torch.randperm(count + new, generator=generator)
            kept, fresh = held_out_scores(table[order[:count]]), table[order[count:]]
            covered.append(float((fresh <= quantile(kept, 1 - miss)).double().mean()))
            small.append(float((p_values(kept, fresh) <= miss).double().mean()))
        error = 4 * float(torch.tensor(covered, dtype=torch.float64).std()) / splits**0.5
        mean = sum(covered) / splits
        assert 1 - miss - error <= mean <= 1 - miss + 1 / (count + 1) + error
        assert miss - 1 / (count + 1) - error <= sum(small) / splits <= miss + error


def test_beyond_a_score_that_was_the_same_for_all_tuning_samples_new_inputs_tie_with_held_out_ones() -> None:
    tails = {"entropy": tail_of(torch.zeros(10), 5)}
    held_out = held_out_scores(joint_score(tails, {"entropy": torch.tensor([0.0, 1.0, 2.0])}))
    found = p_values(held_out, joint_score(tails, {"entropy": torch.tensor([0.0, 5.0])}))
    assert found.tolist() == [1.0, 0.75]
