"""A copy of a predictor predicts bit for bit what it predicts, whatever the options of its head and the way to copy.

Every method is in ``test_conformance_heads.py``.
"""

import copy
import functools
import io
import multiprocessing
import pickle
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from networks import short, short_options
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import Batch
from posthoc_uq.methods import METHODS
from posthoc_uq.posteriors import SYMMETRY

# one that keeps the mean, and those with a mean of their own
CHOSEN = ["inf", *(name for name in METHODS if short(name).trains)]
HEADS: dict[str, dict[str, Any]] = {
    "sampling": {"head": "sampling", "n_samples": 4, "novelty": True},
    "loop": {"head": "sampling", "n_samples": 3, "antithetic": True, "batched": False},
    "exact": {"head": "linearized", "engine": "exact"},
    "top": {"head": "linearized", "outputs": 2, "link": "probit"},
    "jvp": {"head": "linearized", "engine": "jvp", "n_probes": 3},
    "moments": {"head": "moments"},
    "full covariance": {"head": "moments", "cov": "full"},
}


class Net(nn.Module):
    """A convolution and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
        self.hidden, self.last = nn.Linear(12, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.hidden(self.body(x).flatten(1))))


def _data(samples: int = 12) -> Tensor:
    return torch.randn(samples, 1, 4, 4, generator=torch.Generator().manual_seed(1))


@functools.cache
def _fitted(method: str, layers: str) -> tuple[nn.Module, uq.Posterior]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    x = _data()
    posterior = uq.fit(
        model,
        [(x, torch.arange(12) % 3)],
        method=method,
        layers=None if layers == "all" else layers,  # what the method is for, which is the last one for some
        prior_precision=4.0,
        progress=False,
        **short_options(method),
    )
    return model, posterior


def _predictor(method: str, layers: str, head: str) -> Any:
    model, posterior = _fitted(method, layers)
    options = dict(HEADS[head])
    if SYMMETRY not in posterior.capabilities:
        options.pop("antithetic", None)
    return uq.wrap(model, posterior, **options)


def _all_of(predictor: Any) -> dict[str, Tensor]:
    """What a predictor says of some inputs, in every way that it has."""
    x = _data(7)
    found = predictor(x).to_dict()
    found["novelty of the top class"] = predictor.novelty(x, of="top")
    if predictor.head != "sampling":
        found["functional variance"] = predictor.functional_variance(x)
    if predictor.head == "linearized":
        found["functional covariance"] = predictor.functional_covariance(x)
    features = predictor.features(x)
    if features is not None:
        prediction = predictor.prediction_of(predictor.distribution_from(features))
        found |= {f"{k} from features": v for k, v in prediction.to_dict().items()}
    return found


def _saved(predictor: Any) -> Any:
    file = io.BytesIO()
    torch.save(predictor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda predictor: pickle.loads(pickle.dumps(predictor)),
    "torch.save": _saved,
    "copy of a copy": lambda predictor: copy.deepcopy(pickle.loads(pickle.dumps(predictor))),
}


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor], where: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), (where, name)


@pytest.mark.filterwarnings("ignore:.*log_variance_lr.*")
@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("method", CHOSEN)
@pytest.mark.covering(1)
def test_copies_predict_the_same_bits(method: str, head: str, layers: str) -> None:
    predictor = _predictor(method, layers, head)
    unused = copy.deepcopy(predictor)
    expected = _all_of(predictor)
    assert float(expected.get("functional variance", torch.ones(1)).min()) > 0
    _compare(_all_of(unused), expected, "before the first prediction")
    for way, copied in COPIES.items():
        _compare(_all_of(copied(predictor)), expected, way)
    other = predictor.posterior.with_settings(temperature=3.0)
    if "scale" in other.tunable:
        other = other.with_settings(scale=1.0)
    twin = copy.deepcopy(predictor).with_posterior(other, 0)
    assert not torch.equal(twin(_data(7)).probs, expected["probs"])
    _compare(_all_of(predictor), expected, "after the copy was changed")


def test_a_copy_takes_the_way_that_was_settled() -> None:
    """Recorded or whole passes, draw by draw or together: the original does not differ from its copy by rounding."""
    predictor = _predictor("diag", "last", "sampling")
    predictor(_data(7))
    frozen = predictor.ensemble.frozen
    frozen._usable = dict.fromkeys(frozen._usable, False)
    predictor(_data(7))
    predictor.ensemble._chunks = dict.fromkeys(predictor.ensemble._chunks, 1)
    for copied in (copy.deepcopy(predictor), _saved(predictor)):
        assert copied.ensemble.frozen.features(Batch((_data(7),))) is None
        assert copied.ensemble._chunks == predictor.ensemble._chunks
        assert torch.equal(copied(_data(7)).probs, predictor(_data(7)).probs)


def _in_process(predictors: dict[Any, Any], queue: Any) -> None:
    torch.set_num_threads(1)
    for key, predictor in predictors.items():
        queue.put((key, {name: tensor.numpy() for name, tensor in _all_of(predictor).items()}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*log_variance_lr.*")
@pytest.mark.study
def test_predictors_in_a_new_process_predict_the_same_bits() -> None:
    keys = list(zip(CHOSEN, cycle(HEADS), strict=False))
    predictors = {key: _predictor(key[0], "all", key[1]) for key in keys}
    expected = {key: _all_of(predictor) for key, predictor in predictors.items()}
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    job = context.Process(target=_in_process, args=(predictors, queue))
    job.start()
    for _ in keys:
        key, values = queue.get(timeout=120)
        _compare({name: torch.from_numpy(value) for name, value in values.items()}, expected[key], key)
    job.join()
