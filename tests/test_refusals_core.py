"""What the core refuses: data, batches, models and what they return."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from refusals import Row, hold
from small_fits import fit, inputs, labels, net
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import NonFiniteError, PosteriorMismatchError


def split(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(5), y.split(5), strict=True))


def with_numbers(value: float) -> Tensor:
    x = inputs()
    x[11, 2] = value
    return x


def changed(model: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        model[2].weight[0, 0] += 1e-6
    return model


class Shrinks:
    """A loader that gives fewer samples from the second time on."""

    reads = 0

    def __iter__(self) -> Any:
        self.reads += 1
        return iter(split(inputs(), labels())[: 3 if self.reads < 2 else 2])


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).sum(0)


X, Y = inputs(), labels()
REGRESSION: dict[str, Any] = {"likelihood": "regression", "model": net(outputs=2)}
BINARY: dict[str, Any] = {"likelihood": "binary", "model": net(outputs=1)}
WIDE = nn.Sequential(nn.Linear(4, 5000), nn.ReLU(), nn.Linear(5000, 3))
RELU = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
POSTERIOR = fit()
PREDICTOR = cast(Any, uq.wrap(net(), POSTERIOR))
LAYERS = {"0": 1.0, "2": 1.0}


def set_prior(value: Any) -> None:
    fit().with_settings(prior_precision=value)


ROWS = {
    # of a fit
    "data once": Row(lambda: fit(loader=iter(split(X, Y)), method="inf"), "read only once.*DataLoader"),
    "fewer samples": Row(lambda: fit(loader=Shrinks(), method="efb"), "12 samples .* and 10 when"),
    "no layer": Row(lambda: fit(nn.BatchNorm1d(4)), "no Linear or convolution layer"),
    "no parameters": Row(lambda: fit(nn.Flatten()), "no parameters"),
    "too large": Row(lambda: fit(WIDE, method="full"), r"\(12 GiB\).*method='inf'"),
    "n_samples without draws": Row(lambda: fit(n_samples=3, fisher="exact"), "n_samples"),
    "a prior by layer": Row(lambda: fit(prior_precision=LAYERS), "one number for all layers"),
    "half precision": Row(lambda: fit(dtype=torch.float16), "torch.float64"),
    "noise twice": Row(lambda: fit(likelihood=uq.Gaussian(0.3), noise_variance=0.1), "its own noise"),
    "noise that depends on inputs": Row(
        lambda: fit(noise_variance=lambda x: x, **REGRESSION),  # type: ignore[arg-type]
        "noise_variance must be a number",
    ),
    # of labels and outputs
    "labels of another type": Row(lambda: fit(loader=[(X, Y.float())]), "integers of shape"),
    "labels in a column": Row(lambda: fit(loader=[(X, Y[:, None])]), r"pass y\.squeeze\(1\)"),
    "labels as zeros": Row(lambda: fit(loader=[(X, 0.0 * Y)]), r"batch\[1\]\.long\(\)"),
    "too few labels": Row(lambda: fit(loader=[(X, Y[1:])]), r"of shape \(11,\)"),
    "three binary labels": Row(lambda: fit(loader=[(X, Y)], **BINARY), "must be 0 or 1"),
    "the batch of a label": Row(lambda: fit(loader=[(X, Y), (X, Y + 5)]), "Batch 1: .*from 5"),
    "one output of classes": Row(lambda: fit(net(outputs=1)), "likelihood='binary'"),
    "three outputs of one label": Row(lambda: fit(likelihood="binary"), "'binary' needs outputs"),
    "targets of another shape": Row(lambda: fit(loader=[(X, X)], **REGRESSION), "do not fit outputs"),
    "targets without numbers": Row(
        lambda: fit(loader=[(X, torch.full((12, 2), float("nan")))], **REGRESSION),
        "targets are not finite",
    ),
    "no error at all": Row(
        lambda: fit(loader=[(X, REGRESSION["model"](X).detach())], **REGRESSION),
        "without error.*noise_variance",
    ),
    "infinite inputs": Row(lambda: fit(RELU, split(with_numbers(float("inf")), Y)), "Batch 2: ", NonFiniteError),
    "no labels": Row(lambda: fit(loader=[X], fisher="empirical"), "needs labels"),
    "no labels for the evidence": Row(lambda: fit(loader=[X]).log_marginal_likelihood(), "no labels"),
    # of batches and of what the model returns
    "images in a list": Row(lambda: fit(loader=[([X, X], Y)]), "list of 2 tensors.*torch.stack"),
    "boxes": Row(lambda: fit(loader=[([X, X], [{"b": X}] * 2)]), "list of dict.*detector"),
    "a sum returned": Row(lambda: fit(Summed()), r"shape \(3,\) for 2 samples"),
    # of a posterior, a head and a prediction
    "no draws": Row(lambda: POSTERIOR.sample(0), "number of draws must be"),
    "an unknown layer": Row(lambda: POSTERIOR.quadratic({"5": X}), "unknown: .'5'"),
    "a prior for some layers": Row(lambda: set_prior({"0": 1.0}), "every layer once.*'2'"),
    "a prior for more layers": Row(lambda: set_prior(LAYERS | {"9": 1.0}), "every layer once.*'9'"),
    "a prior of a layer": Row(lambda: set_prior(LAYERS | {"0": -1.0}), "of layer '0' must be"),
    "several numbers": Row(lambda: set_prior(torch.ones(2)), r"Tensor of shape \(2,\)"),
    "another shape": Row(lambda: uq.wrap(nn.Sequential(nn.Linear(4, 6)), POSTERIOR), "shape", PosteriorMismatchError),
    "a missing layer": Row(lambda: uq.wrap(nn.Sequential(net()[0]), POSTERIOR), "'2.weight'", PosteriorMismatchError),
    "other values": Row(lambda: uq.wrap(changed(net()), POSTERIOR), "values .*'2.weight'", PosteriorMismatchError),
    "other precision": Row(lambda: uq.wrap(net().half(), POSTERIOR), "the model as it was", PosteriorMismatchError),
    "referral of inputs": Row(lambda: uq.Referral()(X), "what a predictor returned"),  # type: ignore[arg-type]
    "export of an array": Row(lambda: uq.export(PREDICTOR, X.numpy()), "example of the model"),  # type: ignore[arg-type]
    "export of nothing": Row(lambda: uq.export(PREDICTOR), "example of the model"),
    "export of a model": Row(lambda: uq.export(net(), X), "not a Sequential"),  # type: ignore[arg-type]
    "tuning of a model": Row(lambda: uq.tune(net(), [(X, Y)]), "takes a posterior"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
