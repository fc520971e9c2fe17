"""What posteriors refuse: settings, priors of weights and questions that do not fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from networks import registries_restored
from refusals import Row, hold
from small_fits import fit, inputs, labels, net

import posthoc_uq as uq
from posthoc_uq.posteriors import Block, DiagonalBlock

X, Y = inputs(), labels()
POSTERIOR = fit()
LAYERS = {"0": 1.0, "2": 1.0}
OWN = {name: torch.full_like(p, 0.5).detach() for name, p in net().named_parameters()}


@cache
def fitted(method: str, likelihood: str = "classification") -> uq.Posterior:
    targets = Y if likelihood == "classification" else X[:, :3]
    return fit(loader=[(X, targets)], method=method, likelihood=likelihood)


def set_prior(value: Any) -> None:
    POSTERIOR.with_settings(prior_precision=value)


def train(**options: Any) -> None:
    """By a method that has one prior for all weights."""
    uq.fit(net(), [(X, Y)], "utvi", epochs=1, progress=False, **options)


def of_messages() -> None:
    uq.fit(net(), [(X, Y)], "message_passing", prior_mean=0.5, progress=False)


def block(**attributes: Any) -> None:
    with registries_restored():
        type("Other", (Block,), attributes)


LACKING = (
    ("kfac", "classification", "residual_weight", "only the low rank of method='inf' leaves a residual"),
    ("kfac", "classification", "noise_scale", "its likelihood has no noise"),
    ("kfac", "regression", "temperature", "this likelihood's outputs are none"),
)
ROWS = {
    # settings
    "a prior for some layers": Row(lambda: set_prior({"0": 1.0}), "every layer once.*'2'"),
    "a prior for more layers": Row(lambda: set_prior(LAYERS | {"9": 1.0}), "every layer once.*'9'"),
    "a prior of a layer": Row(lambda: set_prior(LAYERS | {"0": -1.0}), "of layer '0' must be"),
    "one of two settings": Row(lambda: POSTERIOR.with_settings(temperature=3.0, scale=0.0), "scale must be"),
    "a shift for all classes": Row(lambda: POSTERIOR.with_settings(class_shift=1.0), "class_shift must be"),
    "a scale of nothing": Row(lambda: POSTERIOR.with_settings(class_scale=[0.0, 1.0]), "class_scale must be"),
    "a shift of values": Row(
        lambda: fitted("kfac", "regression").with_settings(class_shift=[1.0]), "has no class shift: .* outputs are none"
    ),
    "settings of one's own": Row(lambda: POSTERIOR.at(replace(POSTERIOR.settings, scale=0.0)), "scale must be"),
    **{
        f"{name} of {method}, {likelihood}, {way}": Row(
            lambda method=method, likelihood=likelihood, given=given: fitted(method, likelihood).with_settings(**given),
            rf"method='{method}' has no {name.replace('_', ' ')}: .*{why}. Leave {name} at 1.0")
        for method, likelihood, name, why in LACKING
        for way, given in {"alone": {name: 0.5}, "beside another": {"scale": 3.0, name: 0.5}}.items()
    },
    **{
        f"{name} of {method}, {likelihood}, as settings": Row(
            lambda method=method, likelihood=likelihood, name=name: fitted(method, likelihood).at(
                replace(fitted(method, likelihood).settings, **{name: 0.5})
            ),
            rf"method='{method}' has no {name.replace('_', ' ')}: .*{why}. Leave {name} at 1.0")
        for method, likelihood, name, why in LACKING
    },
    # questions
    "no draws": Row(lambda: POSTERIOR.sample(0), "number of draws must be"),
    "an unknown layer": Row(lambda: POSTERIOR.quadratic({"5": X}), "unknown: .'5'"),
    # priors of single weights
    "a prior by layer": Row(lambda: fit(prior_precision=LAYERS), "one number for all layers, or tensors by the names"),
    "a prior by layer, kfac": Row(
        lambda: fit(method="kfac", prior_precision=LAYERS), "one number for all layers, or tensors by the names"),
    "a prior of weights, kfac": Row(
        lambda: fit(method="kfac", prior_precision=OWN), "not diagonal in the Kronecker basis"),
    "a prior of weights, efb": Row(
        lambda: fit(method="efb", prior_precision=OWN), "not diagonal in the Kronecker basis of method='efb'"),
    "a prior of weights, a training": Row(
        lambda: train(prior_precision=OWN), "takes one number as prior_precision, not one a weight"),
    "a mean of messages": Row(of_messages, "enters the log marginal likelihood of a Laplace posterior alone"),
    "a prior of one parameter": Row(
        lambda: fit(prior_precision={"0.weight": OWN["0.weight"]}), "there is none for"),
    "a prior of another layer": Row(
        lambda: fit(prior_precision=OWN, layers="last"), "no parameters of the posterior's layers"),
    "a negative prior": Row(
        lambda: fit(prior_precision=OWN | {"2.bias": torch.tensor([1.0, -1.0, 1.0])}), "must be positive everywhere"),
    "a prior of another shape": Row(
        lambda: fit(prior_precision=OWN | {"2.bias": torch.ones(2)}), "must have the shape"),
    "a mean that is no number": Row(lambda: fit(prior_mean={"0.weight": float("nan")}), "must be finite"),
    "a mean of no parameter": Row(lambda: fit(prior_mean={"weight": 1.0}), "no parameters of the posterior's layers"),
    "an infinite mean": Row(lambda: fit(prior_mean=float("inf")), "prior_mean must be a finite number"),
    "a mean in words": Row(lambda: fit(prior_mean={"0.weight": "one"}), "must be a tensor or a number"),
    # blocks of one's own
    "a kind that there is": Row(
        lambda: block(kind="diagonal", makes=DiagonalBlock.makes),
        r"cannot be a block of the kind 'diagonal', which .*DiagonalBlock"),
    "a block that makes nothing": Row(lambda: block(kind="vague"), "must say in 'makes'"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
