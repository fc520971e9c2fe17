"""What `wrap` and the heads refuse; a row each. What a head needs of a posterior is in ``test_conformance_heads.py``, a
value of a wrong type in ``test_options.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from refusals import Row, hold
from small_fits import fit, inputs, labels, net
from torch import Tensor, nn

import posthoc_uq as uq

X, Y = inputs(), labels()


@functools.cache
def posterior(method: str = "diag") -> uq.Posterior:
    return fit(net(), method=method)


def wrapped(head: str | None = None, method: str = "diag", **options: Any) -> Any:
    return uq.wrap(net(), posterior(method), head, **options)


@functools.cache
def valued(likelihood: str = "regression") -> tuple[nn.Module, uq.Posterior]:
    model = net(outputs=1)
    given = {"noise_variance": 1.0} if likelihood == "regression" else {}
    return model, fit(model, [(X, torch.ones(12, 1))], likelihood=likelihood, **given)


def in_rows() -> Any:
    model = net(outputs=2)
    own = fit(model, [(X, torch.arange(12) % 3)], likelihood="ordinal")
    return uq.wrap(nn.Sequential(*model, nn.Unflatten(1, (1, 2))), own, "linearized")(X)


class Sorts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(x).values


def used_twice() -> nn.Sequential:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


def fitted_and_wrapped(model: nn.Module, head: str, **options: Any) -> Any:
    return uq.wrap(model, fit(model), head, **options)


NO_LINK = r"link must be .*'mc'"
ROWS = {
    "an unknown head": Row(lambda: wrapped("crystal ball"), "head must be one of"),
    "almost a head": Row(lambda: wrapped("linear"), "Did you mean 'linearized'"),
    "draws of moments": Row(lambda: wrapped("moments", n_samples=3), r"does not take \['n_samples'\]"),
    "a link of draws": Row(lambda: wrapped("sampling", link=True), r"does not take \['link'\]"),
    "pairs of moments": Row(lambda: wrapped("moments", antithetic=True), r"does not take \['antithetic'\]"),
    "pairs of Jacobians": Row(lambda: wrapped("linearized", antithetic=True), r"does not take \['antithetic'\]"),
    "almost an option": Row(lambda: wrapped(n_sample=3), r"Did you mean 'n_samples'\?"),
    "almost a link": Row(lambda: wrapped(lnk=3), r"Did you mean 'link'\?"),
    "no draws": Row(lambda: wrapped(n_samples=0), "n_samples must be"),
    "a model without the layer": Row(
        lambda: uq.wrap(nn.Sequential(net()[0]), posterior()), r"2\.weight.*the model lacks", uq.PosteriorMismatchError,
    ),
    "a path": Row(lambda: uq.wrap(net(), "p.h5"), r"uq\.load"),  # type: ignore[arg-type]
    "a path to save": Row(lambda: uq.save("p.h5", posterior()), "posterior first"),  # type: ignore[arg-type]
    # of predictions
    "a tensor as loader": Row(lambda: wrapped().predict(X), "iterable of batches"),
    "a data module as loader": Row(
        lambda: wrapped().predict(type("Module", (), {"train_dataloader": 1})()), "give one of its loaders"
    ),
    "no batch": Row(lambda: wrapped().predict([]), "no batch"),
    "batches of three": Row(lambda: wrapped().predict([(X, X, X)]), "batch_to_inputs"),
    "no inputs": Row(lambda: wrapped("linearized")(X[:0]), "needs an input tensor with at least one sample"),
    "values in positions": Row(in_rows, r"\(batch, outputs\)"),
    "novelty of the mean": Row(lambda: wrapped().novelty(X, of="mean"), "of must be one of"),
    "novelty of no prior": Row(lambda: wrapped().novelty(X, of="top", prior_precision=0), "prior_precision must be"),
    "features of another size": Row(lambda: posterior().features.novelty(torch.zeros(2, 7)), "6 numbers a sample"),
    "no smoothing": Row(lambda: setattr(posterior().features, "smoothing", 0), "smoothing"),
    # of one head
    "an engine that is gone": Row(lambda: wrapped("linearized", engine="last_layer"), "engine must be"),
    "gradients through products": Row(
        lambda: wrapped("linearized", backpropagate=True, engine="jvp"), "forms the Jacobian of all outputs",
    ),
    "gradients of two outputs": Row(
        lambda: wrapped("linearized", backpropagate=True, outputs=2), "forms the Jacobian of all outputs",
    ),
    "a logit link of values": Row(lambda: uq.wrap(*valued(), "linearized", link="logit"), NO_LINK),
    "a logit link of moments of values": Row(lambda: uq.wrap(*valued(), "moments", link="logit"), NO_LINK),
    "a probit link of counts": Row(lambda: uq.wrap(*valued("poisson"), "linearized", link="probit"), NO_LINK),
    "a probit link of moments of counts": Row(lambda: uq.wrap(*valued("poisson"), "moments", link="probit"), NO_LINK),
    "a link by no draws": Row(lambda: uq.wrap(*valued(), "linearized", n_draws=0), "n_draws must be"),
    "a kappa below zero": Row(lambda: wrapped("moments", kappa=-0.5), "kappa must be a finite number >= 0 .*not -0.5"),
    "a kappa that a head learns": Row(lambda: wrapped("moments", kappa="learned"), "kappa must be a finite number"),
    "moments by no draws": Row(lambda: uq.wrap(*valued(), "moments", n_draws=0), "n_draws must be"),
    "rows of a subnetwork": Row(
        lambda: wrapped("moments", "subnetwork", cov="full"), "cov='full' needs row covariances.*take cov='diag'",
    ),
    "moments of a sort": Row(
        lambda: fitted_and_wrapped(nn.Sequential(nn.Linear(4, 3), Sorts()), "moments")(X),
        r"In module '1' .*torch\.sort",
    ),
    "weights and outputs": Row(lambda: wrapped("sampling", drawn="both"), "drawn must be"),
    "outputs of one batch": Row(lambda: wrapped("sampling", drawn="outputs", batched=True), "batched="),
    "outputs in pairs": Row(lambda: wrapped("sampling", drawn="outputs", antithetic=True), "antithetic"),
    "outputs of correlated weights": Row(
        lambda: wrapped("sampling", "kfac", drawn="outputs"), "moments of independent weights.*take drawn='weights'",
    ),
    "an exported draw of outputs": Row(
        lambda: uq.export(wrapped("sampling", drawn="outputs"), X), "an exported program cannot",
    ),
    "outputs of a layer in two places": Row(
        lambda: fitted_and_wrapped(used_twice(), "sampling", drawn="outputs")(X), "'0' was used 2 times",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
