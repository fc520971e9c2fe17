"""Every method through every head, for every likelihood: predictions, copies, draws that are kept or made anew."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
from networks import (
    LIKELIHOODS,
    batches,
    can,
    cnn,
    heads_of,
    inputs_of,
    outputs_for,
    short,
    takes_likelihood,
    targets_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq.heads import HEADS
from posthoc_uq.likelihoods import resolve_likelihood
from posthoc_uq.methods import METHODS
from posthoc_uq.posteriors import QUADRATIC

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

METHOD = pytest.mark.parametrize("name", METHODS)
HEAD = pytest.mark.parametrize("head", HEADS)
LIKELIHOOD = pytest.mark.parametrize("likelihood", LIKELIHOODS)
X = inputs_of(1, 4, 4, samples=7, seed=9)


@functools.cache
def kept(name: str, likelihood: str = "classification") -> tuple[nn.Module, uq.Posterior]:
    """A fit of the small convolutional network, which no test changes."""
    model, x = cnn(outputs_for(resolve_likelihood(likelihood))), inputs_of(1, 4, 4)
    data = batches(x, targets_of(model, x, likelihood))
    options: dict[str, Any] = {"prior_precision": 4.0, "progress": False}
    options |= {"divergence": None} if short(name).trains else {}
    return model, uq.fit(model, data, short(name), likelihood=likelihood, **options)


def wrapped(name: str, head: str, likelihood: str = "classification", **options: Any) -> Any:
    """A predictor of few draws, where the head takes a number of them, which knows its novelty."""
    model, posterior = kept(name, likelihood)
    taken = inspect.signature(HEADS[head]).parameters
    few = {option: value for option, value in {"n_samples": 4, "novelty": True}.items() if option in taken}
    return uq.wrap(model, posterior, head, **few | options)


def said(predictor: Any, x: Tensor = X, prediction: Any = None) -> dict[str, Tensor]:
    """What a predictor says of some inputs, in the ways that its posterior can."""
    kinds = ["class", "top"] if can(predictor.posterior, QUADRATIC) else ["class"]
    return (prediction or predictor(x)).to_dict() | {
        f"novelty of {of}": predictor.novelty(x, of=of) for of in kinds
    }


def refuses(name: str, head: str) -> bool:
    """Whether the head needs what the method's posteriors cannot do; then `wrap` says so."""
    model, posterior = kept(name)
    if head in heads_of(posterior):
        return False
    served = heads_of(posterior)[0]
    with pytest.raises(
        uq.PosthocUQError, match=f"head='{head}' needs .*method='{name}' do not have; .*{served}.*"
    ):
        uq.wrap(model, posterior, head)
    return True


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], where: Any) -> None:
    assert found.keys() == expected.keys(), where
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), (where, key)


@LIKELIHOOD
@HEAD
@METHOD
@pytest.mark.covering(2)
def test_predictions(name: str, head: str, likelihood: str) -> None:
    if not takes_likelihood(name, likelihood) or refuses(name, head):
        return
    predictor = wrapped(name, head, likelihood)
    prediction = predictor(X)
    assert predictor.head == head and len(prediction) == len(X)
    found = said(predictor, X, prediction)
    for key, tensor in found.items():
        assert len(tensor) == len(X) or key == "noise_variance", key
        assert bool(torch.isfinite(tensor).all()), key
    assert bool((found["novelty of class"] > 0).all()) and bool((found["novelty of class"] <= 1).all())
    loader = DataLoader(TensorDataset(X), batch_size=3)
    joined = predictor.predict(loader, progress=False).to_dict()
    for key, tensor in prediction.to_dict().items():
        if "variation" not in key:  # a count, which jumps at a tie
            torch.testing.assert_close(
                joined[key], tensor, rtol=1e-3, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
            )
    model, posterior = kept(name, likelihood)
    targets = targets_of(model, X, likelihood)
    assert bool(torch.isfinite(prediction.log_prob(targets)).all())
    again = uq.wrap(model, posterior, head)  # with the head's own options
    assert type(again(X)) is type(prediction)


@METHOD
def test_the_head_that_it_is_made_for_is_the_default(name: str) -> None:
    model, posterior = kept(name)
    assert uq.wrap(model, posterior).head == short(name).head == posterior.history.head.name


@HEAD
@METHOD
@pytest.mark.covering(1)
def test_copies_predict_the_same_bits(name: str, head: str) -> None:
    if refuses(name, head):
        return
    predictor = wrapped(name, head)
    unused = copy.deepcopy(predictor)
    expected = said(predictor)
    assert_same(said(unused), expected, "before the first prediction")
    assert_same(said(pickle.loads(pickle.dumps(predictor))), expected, "pickle")
    other = predictor.posterior.with_settings(temperature=3.0)
    if "scale" in other.tunable:
        other = other.with_settings(scale=1.0)
    twin = copy.deepcopy(predictor).with_posterior(other, 0)
    assert not torch.equal(twin(X).probs, expected["probs"])
    assert_same(said(predictor), expected, "after the copy was changed")


@pytest.mark.device
@HEAD
@METHOD
def test_another_device(name: str, head: str, device: torch.device) -> None:
    """A model and a posterior on two devices predict as on one."""
    if refuses(name, head):
        return
    model, posterior = kept(name)
    options = {"n_samples": 4} if head == "sampling" else {}
    expected = uq.wrap(model, posterior, head, **options)(X).to_dict()
    far = copy.deepcopy(model).to(device)
    found = uq.wrap(far, posterior, head, **options)(X.to(device)).to_dict()
    assert {tensor.device.type for tensor in found.values()} == {device.type}
    for key, tensor in expected.items():
        if tensor.is_floating_point() and "variation" not in key:
            torch.testing.assert_close(found[key].cpu().to(tensor), tensor, rtol=1e-2, atol=1e-3)


# Outputs with positions


@functools.cache
def of_tokens(name: str) -> tuple[nn.Module, uq.Posterior] | None:
    """A fit of a network that gives every token its classes; None where the method says that it cannot serve it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    x = inputs_of(5, 3, samples=12)
    labels = (x[..., 0] > 0).long() + (x[..., 1] > 0).long()
    labels[0, 2:] = -100
    options: dict[str, Any] = {"prior_precision": 4.0, "progress": False}
    options |= {"divergence": None} if short(name).trains else {}
    try:
        likelihood = uq.Categorical(class_dim=-1)
        return model, uq.fit(model, batches(x, labels, 4), short(name), likelihood=likelihood, **options)
    except uq.PosthocUQError as error:
        assert "last" in str(error) and "layer" in str(
            error
        )  # it wants the outputs of a last layer, one row a sample
        return None


@METHOD
@HEAD
@pytest.mark.covering(1)
def test_positions(name: str, head: str) -> None:
    fitted = of_tokens(name)
    if fitted is None or head not in heads_of(fitted[1]):
        return
    predictor, x = uq.wrap(*fitted, head), inputs_of(5, 3, samples=7, seed=4)
    prediction = predictor(x)
    assert prediction.probs.shape == (7, 5, 3) and prediction.entropy().shape == (7, 5)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(7, 5))
    torch.testing.assert_close(predictor(x[2:4]).probs, prediction.probs[2:4], rtol=1e-4, atol=1e-6)
    assert predictor.novelty(x).shape == (7, 5) and len(prediction.scores()["entropy"]) == 7
    moved = uq.wrap(fitted[0], fitted[1], head)(x)
    torch.testing.assert_close(moved.probs, prediction.probs)
