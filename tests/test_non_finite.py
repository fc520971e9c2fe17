"""Inputs, curvatures and draws too large for their numbers: a NonFiniteError or a finite answer, never a NaN."""

import functools
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import batches, inputs_of, mlp, short, short_options, takes_likelihood
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import NonFiniteError
from posthoc_uq.core import all_finite
from posthoc_uq.heads.predictor import check_finite
from posthoc_uq.methods import METHODS

LIKELIHOODS = ("classification", "binary", "regression")
HEADS: dict[str, dict[str, Any]] = {
    "sampling": {"head": "sampling", "n_samples": 4},
    "exact": {"head": "linearized", "engine": "exact"},
    "probit": {"head": "linearized", "link": "probit"},
    "bridge": {"head": "linearized", "link": "bridge"},
    "jvp": {"head": "linearized", "engine": "jvp", "n_probes": 3},
    "moments": {"head": "moments"},
    "full covariance": {"head": "moments", "cov": "full"},
}


def _data() -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


@functools.cache
def _fitted(method: str, likelihood: str, size: float = 1.0) -> uq.Posterior:
    outputs = 1 if likelihood == "binary" else 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, outputs))
    x = _data()
    targets = {"classification": torch.arange(6) % 3, "binary": torch.arange(6) % 2, "regression": x}
    options = short_options(method)
    if any(field.name == "context" for field in fields(METHODS[method])):
        options["context"] = "batch"  # a box around huge inputs has no volume that can be drawn from
    if likelihood == "regression":
        options["noise_variance"] = 1.0
    return uq.fit(
        model,
        [(size * x, targets[likelihood])],
        method=method,
        likelihood=likelihood,
        prior_precision=1.0,
        progress=False,
        **options,
    )


def _require_finite(found: dict[str, Tensor], where: Any) -> None:
    for name, tensor in found.items():
        assert bool(torch.isfinite(tensor).all()), (where, name)


def _answers(head: str, posterior: uq.Posterior, x: Tensor) -> int:
    """How many answers were refused; the others must be finite."""
    predictor = uq.wrap(posterior.model, posterior, **HEADS[head])
    asked = [lambda: predictor(x).to_dict(), lambda: predictor.predict([x], progress=False).to_dict()]
    asked.append(lambda: {"novelty": predictor.novelty(x, of="top")})
    if predictor.head != "sampling":
        asked.append(lambda: {"variance": predictor.functional_variance(x)})
    if predictor.head == "linearized":
        asked.append(lambda: {"covariance": predictor.functional_covariance(x)})
    refused = 0
    for ask in asked:
        try:
            _require_finite(ask(), (head, float(x.abs().max())))
        except NonFiniteError:
            refused += 1
    return refused


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.covering(1)
def test_predictions_of_huge_inputs(method: str, head: str) -> None:
    if (method, head) == ("subnetwork", "full covariance"):  # it knows no covariance of rows
        with pytest.raises(uq.PosthocUQError, match="take cov='diag'"):
            _answers(head, _fitted(method, "classification"), _data())
        return
    for likelihood in LIKELIHOODS if method == "diag" else ("classification",):
        posterior = _fitted(method, likelihood)
        assert _answers(head, posterior, _data()) == 0
        assert _answers(head, posterior, 1e38 * _data()) > 0
        _answers(head, posterior, 1e20 * _data())


def test_the_error_counts_the_inputs() -> None:
    posterior = _fitted("diag", "classification")
    x = _data()
    x[2, 0], x[4, 1] = float("nan"), float("inf")
    for head in HEADS:
        predictor = uq.wrap(posterior.model, posterior, **HEADS[head])
        with pytest.raises(
            NonFiniteError, match=r"of 2 of 6 inputs \(number 2 first\) is not finite"
        ) as caught:
            predictor(x)
        assert ("head='linearized'" in str(caught.value)) == (predictor.head != "linearized")


def test_draws_that_overflow() -> None:
    """Finite weights whose products are not."""
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
    posterior = uq.fit(model, [_data()], method="diag", prior_precision=1.0, progress=False)
    posterior = posterior.with_settings(prior_precision=1e-24, scale=1e-24)
    predictor = uq.wrap(model, posterior, head="sampling", n_samples=4)
    with pytest.raises(NonFiniteError, match=r"is too wide for head="):
        predictor(_data())


def test_a_masked_class_is_an_answer() -> None:
    logits = torch.randn(2, 5, 3)
    logits[:, :, 1] = float("-inf")
    prediction = uq.ClassPrediction.from_logits(logits)
    check_finite(prediction.numbers(), "prediction", "linearized")
    assert prediction.probs[:, 1].eq(0).all()
    logits[1, 3, 2] = float("inf")
    with pytest.raises(NonFiniteError, match="of 1 of 5 inputs"):
        check_finite(uq.ClassPrediction.from_logits(logits).numbers(), "prediction", "linearized")


def _rectified() -> nn.Sequential:
    """A network whose features grow with its inputs."""
    net = mlp()
    net[1] = nn.ReLU()
    return net


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.only("diag", "inf", "function_space", "utvi")
def test_what_a_fit_on_extreme_data_gives_is_of_use(name: str, tmp_path: Path) -> None:
    x, y, z = inputs_of(4), torch.arange(24) % 3, inputs_of(3, seed=2)
    few = x.clone()
    few[:8] *= 1e18
    data: list[tuple[str, list[tuple[Tensor, Tensor]]]] = [
        ("classification", [(x[:1], y[:1])]),
        ("classification", batches(0 * x, y)),
        ("classification", batches(few, y)),
        ("classification", batches(1e31 * x, y)),
        ("regression", batches(1e15 * x, z)),
        ("regression", batches(x, 1e20 * z)),
        ("regression", batches(x, _rectified()(x).detach())),
    ]
    refused = 0
    for likelihood, loader in data:
        net = _rectified()
        if not takes_likelihood(name, likelihood):
            continue
        for prior in [{}] if short(name).trains else [{}, {"prior_precision": 1.0}]:
            try:
                posterior = uq.fit(net, loader, short(name), likelihood=likelihood, progress=False, **prior)
            except uq.PosthocUQError as error:
                refused += 1
                assert 20 < len(str(error)) < 600
                continue
            uq.save(posterior, tmp_path / "p.h5")
            prediction = uq.wrap(net, uq.load(tmp_path / "p.h5", net))(x)
            assert all(
                bool(v.isfinite().all()) for v in prediction.numbers().values() if v.is_floating_point()
            )
    assert refused or short(name).trains


@pytest.mark.parametrize("name", ["diag", "full", "subnetwork", "kfac", "efb", "inf", "message_passing"])
@pytest.mark.only("diag", "full", "inf")
def test_an_update_beside_which_all_else_would_be_lost_is_refused(name: str, tmp_path: Path) -> None:
    net, x, y = _rectified(), inputs_of(4), torch.arange(24) % 3
    own: dict[str, Any] = {"posterior": "full"} if name == "message_passing" else {"fisher": "empirical"}
    method = short(name, **own, **({"keep_grams": True} if name == "kfac" else {}))
    posterior = uq.fit(net, batches(x, y), method, progress=False)
    before, more = uq.wrap(net, posterior)(x).probs, inputs_of(4, samples=8, seed=3)
    for size in (1e9, 1e12, 1e18, 1e36):
        with pytest.raises(uq.PosthocUQError):
            uq.update(posterior, [(size * more, y[:8])], progress=False)
    for size in (0.0, 1.0, 20.0):
        posterior = uq.update(posterior, [(size * more, y[:8])], progress=False)
        uq.save(posterior, tmp_path / "p.h5")
        posterior = uq.update(posterior, [(size * more, y[:8])], remove=True, progress=False)
        after = uq.wrap(net, posterior)(x).probs
        assert after.isfinite().all()
        if name != "message_passing":  # whose sites of such data are not found again
            torch.testing.assert_close(after, before, atol=5e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_numbers_are_told_from_others_where_their_sum_overflows(dtype: torch.dtype) -> None:
    largest, infinite = torch.finfo(dtype).max, float("inf")
    for values in ([], [0.0], [1.0, -2.0], [largest, largest], [-largest, -largest, largest]):
        assert all_finite(torch.tensor(values, dtype=dtype))
    for values in ([infinite], [infinite, -infinite], [1.0, float("nan")], [largest, largest, -infinite]):
        assert not all_finite(torch.tensor(values, dtype=dtype))
