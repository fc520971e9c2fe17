"""Warnings point at the user's line, from whatever depth of the package they come."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import posthoc_uq as uq
from posthoc_uq.deployment import exportable


def _loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(8, 4), torch.randint(0, 3, (8,)))]


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def _few_steps() -> Any:
    return uq.fit(_net(), _loader(), uq.FunctionSpace(epochs=1), progress=False)


def _no_targets() -> Any:
    return uq.fit(_net(), [_loader()[0][0]], likelihood="regression", prior_precision=1.0, progress=False)


def _probabilities() -> Any:
    model = nn.Sequential(_net(), nn.Softmax(1))
    return uq.fit(model, _loader(), likelihood=uq.Categorical(), prior_precision=1.0, progress=False)


def _another_head() -> Any:
    net = _net()
    return uq.wrap(net, uq.fit(net, _loader(), progress=False), "moments")


def _exported() -> Any:
    net = _net()
    posterior = uq.fit(net, _loader(), prior_precision=1.0, progress=False)
    return exportable(uq.wrap(net, posterior, "linearized"))


@pytest.mark.parametrize("call", [_few_steps, _no_targets, _probabilities, _another_head, _exported])
def test_a_warning_names_the_line_that_called_the_library(call: Callable[[], Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    own = [w for w in caught if w.category is UserWarning]
    assert own and {w.filename for w in own} == {__file__}


def test_a_prior_precision_of_the_method_is_that_of_the_fit() -> None:
    """Without epochs it is the prior of a Laplace posterior, whether the fit or the method was given it."""
    method = uq.FunctionSpace(epochs=0, prior_precision=3.0)
    assert uq.fit(_net(), _loader(), method, progress=False).prior_precision == 3.0
    with pytest.raises(uq.PosthocUQError, match="has one of its own"):
        uq.fit(_net(), _loader(), uq.FunctionSpace(prior_precision=3.0), prior_precision=2.0, progress=False)
