"""What `fit`, `tune`, `calibrate` and `update` refuse, and options of methods; a row each. What every method refuses is
in ``test_conformance_faults.py``, values of wrong types are in ``test_options.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import Row, hold
from small_fits import fit, inputs, labels, net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posthoc_uq as uq
from posthoc_uq import NonFiniteError

NAN = float("nan")
X, Y = inputs(), labels()
DATA = [(X, Y)]


class Unread:
    """A loader that must not be read."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the loader was read")

    def __len__(self) -> int:
        return 1


class NoDivergence(uq.Categorical):
    name = "own"
    divergence = uq.Likelihood.divergence


def before_work(method: Any = "inf", **options: Any) -> uq.Posterior:
    """A fit that must be refused before the loader is read."""
    return uq.fit(net(), Unread(), method, progress=False, **options)


BEFORE_WORK = {
    "no divergence": Row(lambda: before_work(divergence=None), "divergence=None"),
    "a faithful width without a divergence": Row(
        lambda: before_work(likelihood=NoDivergence(), prior_precision="faithful"),
        "no prediction that could be faithful",
    ),
    "the evidence of a training": Row(
        lambda: before_work("function_space", prior_precision="evidence"), "no log marginal likelihood",
    ),
    "a prior by weight of a training": Row(
        lambda: before_work("function_space", prior_precision={"0.weight": 1.0}), "one number",
    ),
    "a prior mean of a training": Row(lambda: before_work("function_space", prior_mean=0.5), "prior_mean"),
    "two priors": Row(lambda: before_work(uq.UTVI(prior_precision=2.0), prior_precision=1.0), "one of its own"),
    "a divergence of latent weights": Row(
        lambda: before_work("latent_binary", divergence=0.01), "leave divergence out",
    ),
    "a faithful width of latent weights": Row(
        lambda: before_work("latent_binary", prior_precision="faithful"), "leave prior_precision out",
    ),
    "an object and its options": Row(lambda: before_work(uq.INF(), rank=5), "options belong there"),
    "almost a rank": Row(lambda: before_work(rnk=5), "rank"),
    "almost a head": Row(lambda: before_work(hed="sampling"), "Did you mean"),
    "held-out data of no kind": Row(lambda: before_work(val_loader=5), "val_loader"),
    "weights of messages": Row(
        lambda: before_work("message_passing", batch_to_weights=lambda batch: None), "batch_to_weights",
    ),
}  # fmt: skip


# Options of a method that a model settles


@functools.cache
def posterior(method: str = "diag", **options: Any) -> uq.Posterior:
    return fit(net(), method=method, **options)


def subnetwork(**mask: Tensor) -> uq.Posterior:
    return fit(method=uq.Subnetwork(mask={name.replace("_", "."): tensor for name, tensor in mask.items()}))


def wider() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))


OF_METHODS = {
    "bases of a diagonal": Row(lambda: fit(method="inf", bases=posterior()), "no eigenbases"),
    "bases of the last layer": Row(
        lambda: fit(method="inf", bases=posterior("inf", layers="last", rank=12)), "no layer '0'",
    ),
    "bases of another layer": Row(lambda: fit(wider(), method="inf", bases=posterior("inf", rank=12)), "Layer '0'"),
    "no weights of a subnetwork": Row(lambda: fit(method="subnetwork", n=0), "n must be"),
    "a subnetwork by size": Row(lambda: fit(method="subnetwork", by="size"), "by must be one of"),
    "a mask of no layer": Row(
        lambda: subnetwork(**{"1_weight": torch.ones(2).bool()}),
        r"mask names '1.weight', no parameter of the layers; .*0.weight",
    ),
    "a mask of numbers": Row(
        lambda: subnetwork(**{"0_weight": torch.ones(5, 4)}),
        r"mask of '0.weight' must be a bool tensor of shape \(5, 4\)",
    ),
    "a mask turned around": Row(
        lambda: subnetwork(**{"0_weight": torch.ones(4, 5).bool()}), r"bool tensor of shape \(5, 4\)",
    ),
    "an empty mask": Row(lambda: subnetwork(**{"0_weight": torch.zeros(5, 4).bool()}), "mask chooses no weight"),
}  # fmt: skip


# What was meant


def meant(**options: Any) -> uq.Posterior:
    return fit(nn.Linear(4, 3), **options)


WORDS: dict[str, tuple[dict[str, Any], str]] = {
    "a method": ({"method": "kfca"}, "'kfac'"),
    "a method in other letters": ({"method": "INF"}, "'inf'"),
    "a class as method": ({"method": "FunctionSpace"}, "'function_space'"),
    "a likelihood": ({"likelihood": "clasification"}, "'classification'"),
    "an option": ({"method": "inf", "rnk": 5}, "'rank'"),
    "two options": ({"method": "inf", "rnk": 5, "basi": 1}, "'rank' or 'basis'"),
    "a value": ({"fisher": "emperical"}, "'empirical'"),
    "an argument": ({"liklihood": "binary"}, "'likelihood'"),
    "a head": ({"head": "linearised"}, "'linearized'"),
    "layers": ({"layers": "lst"}, "'last'"),
    "a context": ({"method": "function_space", "context": "monocrome", "epochs": 1}, "'monochrome'"),
}
MEANT = {
    f"almost {name}": Row(functools.partial(meant, **given), rf"Did you mean {word}\?")
    for name, (given, word) in WORDS.items()
} | {
    "almost bins": Row(lambda: uq.evaluate(net(), [X], nbins=3), r"Did you mean 'bins'\?"),  # type: ignore[call-arg]
    "almost untrusted": Row(lambda: uq.load("a.h5", net(), untrustd=True), r"Did you mean 'untrusted'\?"),  # type: ignore[call-arg]
    "almost a criterion": Row(lambda: tune([X], criterion="faithfull"), r"Did you mean 'faithful'\?"),
    "almost the criterion": Row(lambda: tune([X], citerion="faithful"), r"Did you mean 'criterion'\?"),
    "almost an engine": Row(lambda: tune([X], engin="jvp"), r"Did you mean 'engine'\?"),
    "almost a score": Row(lambda: uq.evaluate(net(), [X], score="entropi"), r"Did you mean 'entropy'\?"),
    "almost an option of a class": Row(lambda: uq.INF(ranc=3), r"Did you mean 'rank'\?"),  # type: ignore[call-arg]
    "an option of the likelihood": Row(
        lambda: fit(net(), likelihood="quantiles", levels=[0.1, 0.9]), r"likelihood=uq\.Quantiles\(levels=\.\.\.\)"
    ),
    "levels that are none": Row(lambda: uq.Quantiles([0.5, 1.2]), "each entry is a finite number > 0 and < 1"),
    "no module": Row(lambda: uq.untied(net(), "O"), "no module"),
}  # fmt: skip


# Searches


def tune(*data: Any, own: uq.Posterior | None = None, **options: Any) -> uq.Posterior:
    return uq.tune(posterior() if own is None else own, *data, progress=False, **options)


def left_out(data: Any = DATA, own: uq.Posterior | None = None, **options: Any) -> uq.Posterior:
    return tune(data, own=own, criterion="leave_one_out", **options)


@functools.cache
def valued(likelihood: str = "regression") -> uq.Posterior:
    return fit(net(outputs=1), [(X, torch.ones(12, 1))], likelihood=likelihood)


@functools.cache
def ordered() -> uq.Posterior:
    return fit(net(outputs=2), [(X, Y)], likelihood="ordinal")


@functools.cache
def weighted() -> uq.Posterior:
    return fit(net(), [(X, Y, torch.full((12,), 2.0))], batch_to_weights=lambda batch: batch[2])


SHUFFLED = DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True)
SEARCHES = {
    "of a model": Row(lambda: uq.tune(net(), DATA), "takes a posterior from .*, not a Sequential"),
    "a temperature by the evidence": Row(lambda: tune(temperature=True), "needs no data"),
    "noise of classes by the evidence": Row(lambda: tune(noise=True), "regression"),
    "a faithful width of nothing": Row(lambda: tune(criterion="faithful"), "needs data"),
    "left out of nothing": Row(
        lambda: tune(criterion="leave_one_out"), "needs data: pass a loader of the training data",
    ),
    "a head by the evidence": Row(lambda: tune(head="linearized"), "needs no head"),
    "data for the evidence": Row(lambda: tune(DATA, criterion="evidence"), "needs no data"),
    "parameters of a faithful width": Row(
        lambda: tune(DATA, criterion="faithful", parameters=("scale",)), "needs neither",
    ),
    "widths by layer": Row(lambda: tune(DATA, per_layer=True), "per_layer"),
    "noise of classes": Row(lambda: tune(DATA, noise=True), "noise=True"),
    "noise and none": Row(lambda: tune(DATA, noise=False, parameters=("noise",)), "parameters"),
    "a parameter that there is not": Row(lambda: tune(DATA, parameters=("colour",)), "among"),
    "values to try": Row(lambda: tune(DATA, prior_precisions=[1.0]), "prior_precisions"),
    "groups of held-out data": Row(lambda: tune(DATA, groups=[0, 1]), "for criterion='leave_one_out'"),
    "starts of a faithful width": Row(
        lambda: tune(DATA, criterion="faithful", initialisations=2), "for criterion='leave_one_out'",
    ),
    "a head of what is left out": Row(lambda: left_out(head="sampling", noise=True), "leave head, noise out"),
    "a link of what is left out": Row(lambda: left_out(link="mc"), "leave link out"),
    "nothing": Row(lambda: tune(DATA, temperature=False, parameters=()), "nothing to tune"),
    "a scaling of no kind": Row(lambda: tune(DATA, scaling="biased"), "Did you mean 'bias'"),
    "a scaling by the evidence": Row(lambda: tune(scaling="bias"), "scaling is chosen by held-out labels"),
    "a scaling that is kept": Row(lambda: tune(DATA, scaling="bias", temperature=False), "leave it out, or scaling"),
    "a scaling of values": Row(lambda: tune([(X, torch.ones(12, 1))], own=valued(), scaling="auto"), "has none"),
    "a shift of ordered classes": Row(lambda: tune(DATA, own=ordered(), scaling="bias"), "no logit of each class"),
    "an option of no search": Row(lambda: tune(DATA, head="moments", n_probes=3), "n_probes"),
    "inputs alone": Row(lambda: tune([X]), "inputs alone"),
    "a temperature of values": Row(lambda: tune([(X, torch.ones(12, 1))], own=valued(), temperature=True), "logits"),
    "no targets left out": Row(lambda: left_out([(X, None)]), "targets"),
    "inputs alone left out": Row(lambda: left_out([X]), "targets"),
    "two left out": Row(lambda: left_out([(X[:2], Y[:2])]), "at least 3"),
    "two groups": Row(lambda: left_out(groups=[0, 1]), "entries"),
    "one group": Row(lambda: left_out(groups=[0] * 12), "one group"),
    "groups of another order": Row(lambda: left_out(SHUFFLED, groups=list(range(12))), "shuffle"),
    "counts left out": Row(lambda: left_out([(X, torch.ones(12, 1))], valued("poisson")), "poisson"),
    "weights left out": Row(lambda: left_out(own=weighted()), "the fit had weights"),
    "weights of what is left out": Row(
        lambda: left_out([(X, Y, torch.ones(12))], batch_to_weights=lambda batch: batch[2]), "batch_to_weights",
    ),
}  # fmt: skip


# Promises


class Changing:
    """A loader that changes its inputs at random."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Any]:
        yield X + torch.randn(X.shape, generator=self.generator), Y


def calibrate(data: Any = DATA, own: uq.Posterior | None = None, **options: Any) -> uq.Posterior:
    given = {"head": "linearized", "link": "probit", "progress": False} | options
    return uq.calibrate(posterior() if own is None else own, data, **given)


PROMISES = {
    "no targets": Row(lambda: calibrate([X]), "targets"),
    "one sample": Row(lambda: calibrate([(X[:1], Y[:1])]), "empty"),
    "unknown sets": Row(lambda: calibrate(sets="ips"), "sets"),
    "all to tune with": Row(lambda: calibrate(share=1.0), "share"),
    "data that are read once": Row(lambda: calibrate(iter(DATA)), "only once"),
    "a class without samples": Row(lambda: calibrate([(X, Y.clamp(max=1))], by_class=True), "none of"),
    "almost an option": Row(lambda: calibrate(n_sample=3), "n_sample"),
    "other inputs each time": Row(lambda: calibrate(Changing()), "other inputs"),
    "a scaling of no logits": Row(
        lambda: calibrate([(X, torch.ones(12, 1))], own=valued(), scaling="bias", link="mc"), "scaling is of logits"
    ),
    "rates of values": Row(
        lambda: calibrate([(X, torch.ones(12, 1))], own=valued(), class_rates=[0.5, 0.5], link="mc"), "has none such"
    ),
    "rates that are counts": Row(
        lambda: calibrate(class_rates=[1, 2, 3]), "with a sum of 6. Divide each by their sum"
    ),
    "rates of two halves": Row(lambda: calibrate(class_rates=[0.5, 0.5, 0.5]), "with a sum of 1.5"),
    "rates of fewer classes": Row(lambda: calibrate(class_rates=[0.5, 0.5]), "of 0 to 1; give a rate for each class"),
    "rates of a class that is not there": Row(
        lambda: calibrate([(X, Y.clamp(max=1))], class_rates=[1e-6, 1e-6, 1 - 2e-6]), "no held-out sample has it"
    ),
    "classes jointly": Row(lambda: calibrate(jointly=True), "no values are predicted"),
}  # fmt: skip


# More data


def update(data: Any, own: Any = None, **options: Any) -> uq.Posterior:
    return uq.update(posterior() if own is None else own, data, progress=False, **options)


def without_its_fisher() -> uq.Posterior:
    own = posterior()
    facts = {name: fact for name, fact in own.history.fit.items() if name != "fisher"}
    return own.replaced(history=replace(own.history, fit=facts))


def in_inference_mode() -> uq.Posterior:
    with torch.inference_mode():
        return update(Unread())


def after_a_change() -> uq.Posterior:
    model = net()
    own = fit(model)
    with torch.no_grad():
        model[2].bias += 1
    return update(Unread(), own)


def moved(**options: Any) -> uq.Posterior:
    """A mean that is to move, of a regression unless said."""
    y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"method": "full", "layers": "last", "likelihood": "regression"} | options
    targets = Y if settings["likelihood"] == "classification" else y
    own = fit(settings.pop("model", None), [(X, targets)], **settings)
    return update([X] if options.get("fisher") == "exact" else Unread(), own, mean=True)


class Summed(nn.Module):
    """Adds its inputs to what a last layer gives, so that its outputs are not the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + x[:, :3]


def moved_within() -> uq.Posterior:
    own = fit(Summed(), [(X, X[:, :3] * 2)], method="full", layers=["body.2"], likelihood="regression")
    return update([(X, X[:, :3] * 2)], own, mean=True)


UPDATES = {
    "a mean of classes": Row(lambda: moved(likelihood="classification"), "likelihood='classification'; train"),
    "a mean by INF": Row(lambda: moved(method="inf"), "method='inf' with fisher='exact'; train"),
    "a mean of drawn labels": Row(lambda: moved(fisher="mc"), "fisher='mc'; train the network on"),
    "a mean of two layers": Row(lambda: moved(layers="all"), "covers 2 layers; train the network on"),
    "a mean of a layer within": Row(moved_within, "does not give the model's outputs"),
    "a mean without targets": Row(lambda: moved(fisher="exact"), "needs targets"),
    "Kronecker factors without Grams": Row(lambda: update(Unread(), posterior("kfac")), "keep_grams=True"),
    "a path to update": Row(lambda: update(DATA, "posterior.h5"), "takes a posterior"),
    "no more data": Row(lambda: update([]), "no batch"),
    "more data of other classes": Row(lambda: update([(X, Y + 5)]), "abel"),
    "more data of no number": Row(lambda: update([(X * NAN, Y)]), "finite", NonFiniteError),
    "a Fisher of unknown labels": Row(lambda: update(Unread(), without_its_fisher()), "which labels"),
    "without gradients": Row(in_inference_mode, "inference_mode"),
    "of a model that was changed": Row(after_a_change, "changed after", uq.PosteriorMismatchError),
}  # fmt: skip


# Weights of samples

WEIGHTS: dict[str, tuple[Any, str]] = {
    "negative": (lambda w: -w, "finite and not negative; this batch's run from -"),
    "infinite": (lambda w: w / 0.0, "finite and not negative"),
    "large": (lambda w: w.double() * 1e20, "too large: .* Divide all weights by their mean"),
    "of no number": (lambda w: w * NAN, "finite and not negative"),
    "in a column": (lambda w: w[:, None], r"must have the shape \(12,\), one a sample, not \(12, 1\)"),
    "of two samples": (lambda w: w[:2], r"Batch 0: The weights of a batch of 12 samples must have the shape"),
    "of zero": (lambda w: 0 * w, "The weights of all samples are 0"),
    "in words": (lambda w: "many", "must give a tensor of numbers, one a sample, not a str"),
    "complex": (lambda w: w + 1j, "must be real numbers"),
}


def with_weights(weights: Any, likelihood: str) -> uq.Posterior:
    y = (
        Y
        if likelihood == "classification"
        else torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    )
    return fit(net(), [(X, y)], likelihood=likelihood, batch_to_weights=lambda _: weights(torch.arange(12.0)))


OF_WEIGHTS = {
    f"weights {name}, {likelihood}": Row(functools.partial(with_weights, weights, likelihood), words)
    for name, (weights, words) in WEIGHTS.items()
    for likelihood in ("classification", "regression")
} | {
    "weights for messages": Row(
        lambda: update(DATA, fit(method=uq.MessagePassing(posterior="full")), batch_to_weights=lambda _: Y + 1),
        "no weights of samples",
    ),
}  # fmt: skip

TABLES = {
    "before work": BEFORE_WORK,
    "method": OF_METHODS,
    "meant": MEANT,
    "search": SEARCHES,
    "promises": PROMISES,
    "update": UPDATES,
    "weights": OF_WEIGHTS,
}
ROWS = {f"{kind}: {name}": row for kind, table in TABLES.items() for name, row in table.items()}


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
