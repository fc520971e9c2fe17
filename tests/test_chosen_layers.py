"""Which layers a fit takes where nobody names layers or a method, and what it says of the other choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq

LABELS = torch.arange(12) % 3


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def cnn(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, outputs))


def fit(model: nn.Module, targets: Tensor = LABELS, *method: Any, **options: Any) -> uq.Posterior:
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    settings = {"prior_precision": 1.0, "progress": False, **options}
    return uq.fit(model, [(x, targets)], *method, **settings)


def chosen(posterior: uq.Posterior) -> str | None:
    return posterior.report().summary.get("layers chosen")


def test_a_perceptron_gets_all() -> None:
    posterior = fit(perceptron())
    assert [*posterior.layers] == ["0", "2"]
    assert chosen(posterior) == (
        "2 layers of a perceptron: a prediction takes some 7 forward passes or more, over the last one "
        "(layers='last') 1 to 2"
    )


def test_another_classifier_gets_the_last() -> None:
    posterior = fit(cnn())
    assert [*posterior.layers] == ["3"]
    said = chosen(posterior)
    assert said is not None and said.startswith(
        "the last of 2 layers: a prediction takes 1 to 2 forward passes"
    )
    assert "over all (layers='all') some 7 forward passes or more" in said


def test_a_regression_gets_all() -> None:
    targets = torch.randn(12, 2, generator=torch.Generator().manual_seed(2))
    posterior = fit(cnn(2), targets, likelihood="regression")
    assert [*posterior.layers] == ["1", "3"]
    assert "2 layers of a regression: a prediction takes some 5 forward passes" in str(chosen(posterior))


@pytest.mark.parametrize("layers", ["last", "all", ["1"]], ids=str)
def test_what_is_named_is_taken(layers: Any) -> None:
    names = {"last": ["3"], "all": ["1", "3"]}.get(str(layers), ["1"])
    posterior = fit(cnn(), layers=layers)
    assert [*posterior.layers] == names and chosen(posterior) is None


def test_a_named_method_covers_all() -> None:
    for method in ("inf", uq.KFAC()):
        posterior = fit(cnn(), LABELS, method)
        assert [*posterior.layers] == ["1", "3"] and chosen(posterior) is None


def test_priors_of_single_weights_are_for_all() -> None:
    model = cnn()
    precisions = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    assert [*fit(model, prior_precision=precisions).layers] == ["1", "3"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "the last of 2 layers: a prediction takes 1 to 2 forward passes, over all"),
        ({"layers": "all"}, "2 layers: a prediction takes some 7 forward passes or more, over the last one"),
    ],
    ids=["chosen", "named"],
)
def test_the_price_is_said_before_it_is_paid(
    options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(cnn(), progress=True, **options)
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.index(said) < printed.index("fitted in")
