"""Numbers of the whole library, kept in ``tests/golden/numbers.npz``, which a change of its structure must not move.

Every method on four tiny float64 networks (linear layers, grouped convolutions, attention, a layer that is used twice)
and every likelihood on the first of them, through every head. Kept are variances, log-determinants, evidence, draws,
predictions, novelty and the hyperparameters that searches find. ``tests/golden/files.zip`` has files of format 1 as the
first code that wrote it wrote them.

``python tests/test_golden.py`` writes the file anew: for a change that is meant to change numbers, whose commit says
which ones and why.
"""

from __future__ import annotations

import functools
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import (
    LIKELIHOODS,
    batches,
    heads_of,
    inputs_of,
    mlp,
    outputs_for,
    short,
    takes_likelihood,
    targets_of,
)
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.fitting import leave_one_out
from posthoc_uq.likelihoods import resolve_likelihood
from posthoc_uq.methods import METHODS

FILE = Path(__file__).parent / "golden" / "numbers.npz"
TOLERANCE = 1e-8
PRIOR = 4.0
SAMPLES = 16

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of trainings that are too short to settle


@pytest.fixture(autouse=True, scope="module")
def nothing_left_out() -> Iterator[None]:
    """Fits of these small networks leave temperature and noise as they are; leave-one-out has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leave_one_out, "is_perceptron", lambda *_: False)
        yield


# Networks


class Grouped(nn.Module):
    """Convolutions, one of them in groups, before a linear layer; for images ``(2, 5, 5)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, groups=2)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.grouped(torch.tanh(self.first(x)))).flatten(1))


class Attention(nn.Module):
    """Self-attention over four tokens of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Repeated(nn.Module):
    """One linear layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: mlp(dtype=torch.float64), (4,)),
    "grouped": (Grouped, (2, 5, 5)),
    "attention": (Attention, (4, 4)),
    "repeated": (Repeated, (4,)),
}


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    make, shape = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return make().double().eval(), shape


# Numbers


def of_posterior(posterior: uq.Posterior) -> dict[str, Any]:
    """What a posterior says without a head."""
    found: dict[str, Any] = {f"mean {name}": mean for name, mean in posterior.mean.items()}
    draws = posterior.sample(2, torch.Generator().manual_seed(3))
    found |= {f"draws {name}": draw for name, draw in draws.items()}
    parts: dict[str, Callable[[], Any]] = {
        "variance": posterior.variance,
        "log determinant": posterior.log_determinant,
        "evidence": posterior.log_marginal_likelihood,
    }
    for name, part in parts.items():
        try:
            value = part()
        except uq.PosthocUQError:  # a capability that its blocks do not have
            continue
        found |= {f"{name} {n}": v for n, v in value.items()} if isinstance(value, dict) else {name: value}
    return found


def of_heads(model: nn.Module, posterior: uq.Posterior, x: Tensor) -> dict[str, Any]:
    """What every head that can serve the posterior predicts for some inputs."""
    found = dict[str, Any]()
    for head in heads_of(posterior):
        options = {"n_samples": 5, "seed": 1} if head == "sampling" else {}
        predictor = uq.wrap(model, posterior, head, **options)
        prediction = predictor(x)
        found |= {f"{head} {key}": value for key, value in prediction.to_dict().items()}
        found[f"{head} novelty"] = predictor.novelty(x, of="class")
    return found


def fitted(
    model: nn.Module, x: Tensor, method: str, likelihood: str = "classification", **options: Any
) -> uq.Posterior:
    known = {"divergence": None} if short(method).trains else {}
    data = batches(x, targets_of(model, x, likelihood), 8)
    settings = {"prior_precision": PRIOR, "progress": False, "likelihood": likelihood} | known | options
    return uq.fit(model, data, short(method), **settings)


def of_network(name: str, method: str) -> dict[str, Any]:
    """A method on a network; where it cannot fit that network, what it says is not golden."""
    model, shape = network(name)
    x = inputs_of(*shape, samples=SAMPLES, dtype=torch.float64)
    try:
        posterior = fitted(model, x, method)
    except uq.PosthocUQError:
        return {"fits": 0.0}
    other = inputs_of(*shape, samples=3, seed=7, dtype=torch.float64)
    return {"fits": 1.0} | of_posterior(posterior) | of_heads(model, posterior, other)


def of_likelihood(likelihood: str, method: str) -> dict[str, Any]:
    """A method on the perceptron with a likelihood."""
    model = mlp(outputs_for(resolve_likelihood(likelihood)), dtype=torch.float64)
    x = inputs_of(4, samples=SAMPLES, dtype=torch.float64)
    posterior = fitted(model, x, method, likelihood)
    other = inputs_of(4, samples=3, seed=7, dtype=torch.float64)
    found = {key: value for key, value in of_posterior(posterior).items() if not key.startswith("mean")}
    return found | of_heads(model, posterior, other)


def of_searches(method: str, likelihood: str) -> dict[str, Any]:
    """The hyperparameters that the three searches find."""
    model = mlp(outputs_for(resolve_likelihood(likelihood)), dtype=torch.float64)
    x = inputs_of(4, samples=SAMPLES, dtype=torch.float64)
    posterior = fitted(model, x, method, likelihood, prior_precision=None)
    found = {f"faithful {key}": value for key, value in posterior.settings.plain().items()}
    held_out = inputs_of(4, samples=12, seed=5, dtype=torch.float64)
    posterior = uq.tune(
        posterior, batches(held_out, targets_of(model, held_out, likelihood), 6), progress=False
    )
    found |= {f"held out {key}": value for key, value in posterior.settings.plain().items()}
    if posterior.has_free_prior_precision:
        posterior = uq.tune(posterior, progress=False)
        found |= {f"evidence {key}": value for key, value in posterior.settings.plain().items()}
    return found


def of_change(method: str) -> dict[str, Any]:
    """The posterior after other data came in, where the method can take them."""
    model = mlp(dtype=torch.float64)
    x, other = (inputs_of(4, samples=SAMPLES, seed=seed, dtype=torch.float64) for seed in (1, 6))
    options = {"keep_grams": True} if method == "kfac" else {}
    known = {"divergence": None} if short(method).trains else {}
    data = batches(x, targets_of(model, x, "classification"), 8)
    posterior = uq.fit(model, data, short(method, **options), prior_precision=PRIOR, progress=False, **known)
    try:
        changed = uq.update(
            posterior, batches(other, targets_of(model, other, "classification"), 8), progress=False
        )
    except uq.PosthocUQError:
        return {"takes data": 0.0}
    return {"takes data": 1.0} | of_posterior(changed)


# Kronecker factors of less than full rank: every basis of their null space is as good as another, processors differ in
# which one they find, and draws differ with it. Variances, determinants and the other heads do not.
ANY_BASIS = ("grouped, efb", "grouped, kfac", "attention, efb", "attention, kfac")
LAPLACE = ("diag", "full", "kfac", "efb", "inf")
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    f"{name}, {method}": functools.partial(of_network, name, method)
    for name in NETWORKS
    for method in METHODS
}
CASES |= {
    f"{likelihood}, {method}": functools.partial(of_likelihood, likelihood, method)
    for likelihood in LIKELIHOODS
    for method in METHODS
    if likelihood != "classification" and takes_likelihood(method, likelihood)
}
CASES |= {
    f"searches, {likelihood}, {method}": functools.partial(of_searches, method, likelihood)
    for likelihood in ("classification", "regression")
    for method in LAPLACE
}
CASES |= {f"update, {method}": functools.partial(of_change, method) for method in METHODS}


def arrays_of(case: str) -> dict[str, np.ndarray]:
    """A case's numbers as flat arrays, each under the case's name and its own."""
    return {
        f"{case}: {key}": torch.as_tensor(value, dtype=torch.float64).detach().numpy().ravel()
        for key, value in CASES[case]().items()
        if case not in ANY_BASIS or not key.startswith(("draws ", "sampling "))
    }


@functools.cache
def kept() -> dict[str, np.ndarray]:
    with np.load(FILE) as file:
        parts = np.split(file["values"], np.cumsum(file["sizes"])[:-1])
        return dict(zip(file["names"].tolist(), parts, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.study
def test_the_numbers_are_as_they_were(case: str) -> None:
    found = arrays_of(case)
    expected = {key: value for key, value in kept().items() if key.startswith(f"{case}: ")}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=key)


FILES = Path(__file__).parent / "golden" / "files.zip"


@pytest.mark.parametrize("case", [f"linear, {method}" for method in METHODS] + ["grouped, inf"])
def test_files_of_the_first_format_predict_as_they_did(case: str, tmp_path: Path) -> None:
    name, method = case.split(", ")
    model, shape = network(name)
    with zipfile.ZipFile(FILES) as files:
        path = files.extract(f"{name}_{method}.h5", tmp_path)
    other = inputs_of(*shape, samples=3, seed=7, dtype=torch.float64)
    found = of_heads(model, uq.load(path, model), other)
    assert found
    for key, value in found.items():
        expected = kept()[f"{case}: {key}"]
        numbers = torch.as_tensor(value, dtype=torch.float64).numpy().ravel()
        np.testing.assert_allclose(numbers, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=key)


def main() -> None:
    """Write the file anew, and say which numbers changed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    before = kept() if FILE.exists() else {}
    now = dict[str, np.ndarray]()
    for case in CASES:
        now |= arrays_of(case)
    changed = [
        key
        for key in before.keys() | now.keys()
        if key not in before
        or key not in now
        or now[key].shape != before[key].shape
        or not np.allclose(before[key], now[key], rtol=TOLERANCE, atol=TOLERANCE)
    ]
    FILE.parent.mkdir(exist_ok=True)
    sizes = np.array([value.size for value in now.values()])
    np.savez_compressed(FILE, names=np.array([*now]), sizes=sizes, values=np.concatenate([*now.values()]))
    print(f"{len(now)} arrays of {len(CASES)} cases; new, gone or other than before: {len(changed)}")
    for key in sorted(changed)[:100]:
        print(" ", key)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    leave_one_out.is_perceptron = lambda *_: False
    main()
