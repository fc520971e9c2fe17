"""What the trained methods and their contexts refuse; a row each. What every method refuses is in
``test_conformance_faults.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from networks import batches, inputs_of, mlp, targets_of
from refusals import Row, hold
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import posthoc_uq as uq
from posthoc_uq.core import Batch
from posthoc_uq.trained import function_space_kl
from posthoc_uq.trained.contexts import (
    Context,
    Corrupted,
    Mixture,
    Monochrome,
    UniformBox,
    default_context,
    resolve_context,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of trainings that are too short to settle

OTHER, UNSUPPORTED = uq.PosteriorMismatchError, uq.UnsupportedLayerError


def fit(*given: Any, **options: Any) -> uq.Posterior:
    return uq.fit(*given, progress=False, **options)


# Contexts

VECTORS, IMAGES = Batch((torch.zeros(8, 2),)), Batch((torch.zeros(8, 2, 9, 8),))


def drawn(context: Context, like: Batch = VECTORS) -> Tensor:
    return context.draw(4, like, torch.Generator().manual_seed(0))


def seen(context: Context, inputs: Tensor) -> None:
    context.observe(inputs, torch.Generator().manual_seed(0))


def two_shapes() -> Mixture:
    return Mixture([(1, "batch"), (1, lambda n, generator: torch.zeros(n, 3))])


CONTEXTS = {
    "monochrome vectors": Row(lambda: seen(Monochrome(), torch.zeros(8, 2)), r"is for images.*\(8, 2\).*uniform"),
    "monochrome without data": Row(lambda: drawn(Monochrome(), IMAGES), "has seen none"),
    "corrupted vectors": Row(lambda: seen(Corrupted(), torch.zeros(8, 2)), r"is for images.*\(8, 2\)"),
    "corrupted without data": Row(lambda: drawn(Corrupted(), IMAGES), "has seen none"),
    "a box of no width": Row(lambda: UniformBox(1.0, 1.0), "finite bounds low < high"),
    "a box without end": Row(lambda: UniformBox(0.0, float("inf")), "finite bounds low < high"),
    "a box of no number": Row(lambda: UniformBox(float("nan"), 1.0), "finite bounds low < high"),
    "half a box": Row(lambda: UniformBox(low=0.0), "both bounds, or none"),
    "a box without data": Row(lambda: drawn(UniformBox()), "saw none"),
    "no parts": Row(lambda: Mixture([]), "pairs"),
    "a part without a share": Row(lambda: Mixture([(0.0, "batch")]), "pairs"),
    "a part that is all": Row(lambda: Mixture([(float("inf"), "batch")]), "pairs"),
    "parts of two shapes": Row(lambda: drawn(two_shapes()), "equal input shapes"),
    "an unknown name": Row(lambda: resolve_context("grey"), r"context must be one of.*'grey'"),
    "a number": Row(lambda: resolve_context(3), "must be an iterable of batches"),
    "a data set": Row(
        lambda: resolve_context(TensorDataset(torch.zeros(3, 1))), r"wrap the data in torch\.utils\.data",
    ),
    "whole numbers as inputs": Row(
        lambda: default_context(Batch((torch.zeros(2, 3, dtype=torch.long),))), "one floating-point input",
    ),
}  # fmt: skip


# Options that do not go together

OPTIONS = {
    "a variance of features": Row(
        lambda: uq.FunctionSpace(prior_variance=2.0), "prior_variance is of prior='independent'",
    ),
    "a precision of outputs": Row(
        lambda: uq.FunctionSpace(prior="independent", prior_precision=2.0), "prior_precision is of prior='features'",
    ),
    "noise of outputs": Row(
        lambda: uq.FunctionSpace(prior="independent", function_noise=1e-3), "function_noise is of prior='features'",
    ),
    "the variance of a certain body": Row(
        lambda: uq.FunctionSpace(body="certain", initial_body_log_variance=-8.0), "no effect",
    ),
    "frozen means of a certain body": Row(
        lambda: uq.FunctionSpace(body="certain", train_mean=False), r"choose layers='last'",
    ),
    "a weight by its name": Row(lambda: uq.FunctionSpace(divergence_weight="batch"), "divergence_weight must be"),
    "no weight": Row(lambda: uq.FunctionSpace(divergence_weight=0.0), "divergence_weight must be"),
    "no epochs": Row(lambda: uq.FunctionSpace(epochs=0), "epochs must be"),
    "an unknown prior": Row(lambda: uq.FunctionSpace(prior="normal"), "prior must be one of"),  # type: ignore[arg-type]
    "no latent epochs": Row(lambda: uq.LatentBinary(epochs=0), "epochs must be"),
    "a weight that is surely there": Row(lambda: uq.LatentBinary(prior_inclusion=1.0), "prior_inclusion"),
    "a flow of a million units": Row(lambda: uq.LatentBinary(flow_units=10**6), "flow_units"),
    "a floor above all": Row(lambda: uq.UTVI(kl_floor=1.5), "kl_floor must be"),
    "draws of a body that is certain": Row(
        lambda: uq.FunctionSpace(n_body_draws=2, body="certain"), "n_body_draws=2 goes with body='linearized'",
    ),
    "a kappa below zero": Row(lambda: uq.UTVI(kappa=-0.5), "kappa must be .* >= 0 .*or 'learned', not -0.5"),
    "noise of no objective": Row(lambda: uq.UTVI(noise="none"), "goes with objective='predictive'"),
    "a random start that stays": Row(lambda: uq.UTVI(start="random", train_mean=False), "do not go with it"),
    "inclusion of random weights": Row(
        lambda: uq.LatentBinary(start="random", initial_inclusion="high"), "goes by trained weights",
    ),
    "full messages of all layers": Row(
        lambda: uq.MessagePassing(layers="all", posterior="full"), "posterior='full' is for the last layer",
    ),
    "a prior at zero": Row(lambda: uq.MessagePassing(layers="all", prior="zero"), "stay alike for ever"),
    "what is for argmax": Row(lambda: uq.MessagePassing(regularize=True), "signal='argmax'"),
}  # fmt: skip


# Fits

X, Y = inputs_of(4), torch.arange(24) % 3


def pictures() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 2)).eval()


def functions(model: nn.Module | None = None, loader: Any = None, **options: Any) -> uq.Posterior:
    data = [(inputs_of(1, 6, 6), torch.arange(24) % 2)] if loader is None else loader
    given = {"epochs": 1, "n_context": 6, "divergence": None} | options
    return fit(pictures() if model is None else model, data, "function_space", **given)


def messages(
    model: nn.Module, *, x: Tensor = X, y: Tensor | None = Y, only: str | None = None, **options: Any
) -> uq.Posterior:
    return fit(model, [x if y is None else (x, y)], uq.MessagePassing(**options), layers=only)


class Wrapped(nn.Module):
    """Calls a model inside of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Parts(nn.Module):
    """Of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(3, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.out((self.first(a) + self.second(b)).tanh())


class Bessel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i0(x)


def shared() -> nn.Sequential:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


def of_zeros() -> nn.Sequential:
    model = mlp()
    nn.init.zeros_(model[0].weight)
    return model


def variances_of_others() -> uq.Posterior:
    model, other = pictures(), pictures()
    with torch.no_grad():
        other[0].weight.mul_(2)
    start = fit(other, [inputs_of(1, 6, 6)], "diag", prior_precision=1.0)
    return functions(model, initial=start)


def variances_of_the_last(method: str = "diag", **options: Any) -> uq.Posterior:
    model = pictures()
    start = fit(model, [inputs_of(1, 6, 6)], method, layers="last", prior_precision=1.0)
    return functions(model, initial=start, **options)


@functools.cache
def posterior() -> uq.Posterior:
    """Of a training in function space."""
    return functions(prior_precision=2.0)


def data_of_posterior() -> list[Any]:
    return [(inputs_of(1, 6, 6), torch.arange(24) % 2)]


POOL = {"a": torch.randn(6, 2), "b": torch.randn(6, 3), "labels": torch.arange(6) % 2}
FITS = {
    "another's option": Row(lambda: functions(rank=10), r"does not take \['rank'\].*'context'"),
    "an unknown context": Row(lambda: functions(context="grey"), "context must be one of"),
    "too few vectors": Row(
        lambda: functions(context=lambda n, g: torch.zeros(n - 1, 1, 6, 6)), "gave 5 inputs in place of 6",
    ),
    "no context": Row(lambda: functions(context=lambda n, g: None), "must give a tensor"),
    "a context of one argument": Row(
        lambda: functions(context=lambda n: torch.zeros(n, 1, 6, 6)), r"takes two arguments, \(n, generator\)",
    ),
    "no shares": Row(lambda: functions(context=["batch", "monochrome"]), r"list of pairs \(share, context\)"),
    "an empty context": Row(lambda: functions(context=torch.zeros(0, 1, 6, 6)), "holds inputs"),
    "other images": Row(
        lambda: functions(context=torch.zeros(9, 2, 6, 6)), r"of shapes \[\(2, 6, 6\)\] .* have \[\(1, 6, 6\)\]",
    ),
    "inputs of two parts": Row(lambda: functions(Parts().eval(), [POOL]), "one floating-point input"),
    "initial variances by a name": Row(lambda: functions(initial="full"), "initial must be"),
    "initial variances of another model": Row(variances_of_others, r"model's '0.weight'", OTHER),
    "initial variances of other layers": Row(variances_of_the_last, "the same layers", OTHER),
    "frozen means of moved ones": Row(
        lambda: functions(posterior().model, initial=posterior(), train_mean=False), "train_mean=False",
    ),
    "the evidence": Row(lambda: functions(prior_precision="evidence"), "give prior_precision a number"),
    "neither a divergence nor a prior": Row(
        lambda: fit(pictures(), data_of_posterior(), divergence=None), "prior_precision='evidence' or a number",
    ),
    "noise of classes": Row(lambda: functions(learn_noise=True), "can be learned"),
    "another's hyperparameter": Row(lambda: functions(residual_weight=0.5), "does not take .*residual_weight"),
    "not the last layer": Row(lambda: functions(layers=["0"]), "have that layer among"),
    "outputs of no layer": Row(lambda: functions(nn.Sequential(*pictures(), nn.Tanh())), "the last layer exactly"),
    "a training without targets": Row(lambda: fit(mlp(), [X], uq.UTVI(epochs=1)), "trains on targets"),
    "early stopping without targets": Row(
        lambda: fit(mlp(), [(X, Y)], uq.UTVI(epochs=1), val_loader=[X]), "Early stopping needs targets",
    ),
    "noise that is learned of labels": Row(
        lambda: fit(nn.Linear(4, 1), [(X, torch.ones(24, 1))], uq.UTVI(noise="learned"), likelihood="binary"),
        "noise='learned' is for likelihood='regression'",
    ),
    "no moments": Row(
        lambda: fit(nn.Sequential(nn.Linear(4, 4), Bessel(), nn.Linear(4, 3)), [(X, Y)], uq.UTVI(epochs=1)),
        r"[Nn]o rule carries mean and variance through",
    ),
    "variances of another start": Row(
        lambda: fit(of_zeros(), [(X, Y)], uq.UTVI(epochs=1, initial=plain()[1])), "on the same model", OTHER,
    ),
    "latent scales": Row(
        lambda: fit(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)), [(X, Y)], "latent_binary", layers="everything"),
        "of kind",
    ),
    "a latent layer used twice": Row(
        lambda: fit(shared(), [(X, torch.arange(24) % 4)], uq.LatentBinary(epochs=1)),
        r"'0' is used 2 times in one pass.*untied",
    ),
    "latent weights in half precision": Row(
        lambda: fit(nn.Sequential(nn.Linear(4, 4).half()), [(X.half(), Y)], uq.LatentBinary(epochs=1)),
        "trains parameters in float32 or float64",
    ),
    "latent weights of zero": Row(
        lambda: fit(of_zeros(), [(X, Y)], uq.LatentBinary(epochs=1)), "'0' has only zero weights",
    ),
    "a faithful width of latent weights": Row(
        lambda: fit(mlp(), [(X, Y)], uq.LatentBinary(epochs=1), prior_precision="faithful"),
        "keeps the variances of its training",
    ),
    "messages through other modules": Row(
        lambda: messages(
            nn.Sequential(
                nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.LayerNorm(4), nn.Linear(4, 4),
                nn.LeakyReLU(2.0), nn.BatchNorm1d(4), Bessel(), nn.Linear(4, 3),
            ).eval(),
            layers="all",
        ),
        r"'0.1' \(GELU\), '1' \(LayerNorm\), '3' \(LeakyReLU with the slope.*'5' \(Bessel\).*layers='last'",
        UNSUPPORTED,
    ),
    "messages through no Sequential": Row(
        lambda: messages(Wrapped(mlp()), layers="all"), r"needs a torch.nn.Sequential, not a Wrapped", UNSUPPORTED,
    ),
    "messages of outputs that no layer gives": Row(
        lambda: messages(nn.Sequential(mlp(), nn.Tanh())), "outputs are those of its last linear layer", UNSUPPORTED,
    ),
    "messages of the first layer": Row(
        lambda: messages(mlp(), only="0"), r"is for '2'.*\['0'\] were selected", UNSUPPORTED,
    ),
    "messages around the border": Row(
        lambda: messages(
            nn.Sequential(nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(8, 3)),
            x=X[:, None], layers="all",
        ),
        r"'0' \(Conv1d, which does more than",
        UNSUPPORTED,
    ),
    "messages without labels": Row(lambda: messages(mlp(), y=None), "loader gives none"),
    "messages of all layers and of the last": Row(
        lambda: messages(mlp(), only="all", layers="last"), "layers='all' and the method for layers='last'",
    ),
    "messages of the last layer and of all": Row(
        lambda: messages(mlp(), only="last", layers="all"), "layers='last' and the method for layers='all'",
    ),
}  # fmt: skip


# What a trained posterior cannot do


@functools.cache
def latent() -> tuple[nn.Module, uq.Posterior]:
    model = mlp()
    data = batches(X, targets_of(model, X, "classification"))
    return model, fit(model, data, uq.LatentBinary(epochs=1))


@functools.cache
def plain() -> tuple[nn.Module, uq.Posterior]:
    model = mlp()
    return model, fit(model, [(X, Y)], "diag", prior_precision=1.0)


def kl(**options: Any) -> Any:
    return function_space_kl(options.pop("posterior", plain()[1]), X, **options)


SPARSE = r"method='diag' are on; fit one with method=uq\.LatentBinary"
POSTERIORS = {
    "another prior precision": Row(
        lambda: posterior().with_settings(prior_precision=3.0),
        r"part of what method='function_space' optimised, and is 2.0; fit again",
    ),
    "evidence": Row(lambda: posterior().log_marginal_likelihood(), "no log marginal likelihood.*val_loader"),
    "a search for it": Row(lambda: uq.tune(posterior()), "no log marginal likelihood.*val_loader"),
    "a search by layer": Row(lambda: uq.tune(posterior(), per_layer=True), "no log marginal likelihood.*val_loader"),
    "a Fisher": Row(lambda: next(iter(posterior().blocks.values())).dense(), "keeps no Fisher"),
    "a divergence from a prior by a name": Row(lambda: kl(prior_mean="random"), "prior_mean must be"),
    "a divergence without noise": Row(lambda: kl(function_noise=0.0), "function_noise must be"),
    "a divergence from no prior": Row(lambda: kl(prior_precision=-1.0), "prior_precision must be"),
    "a divergence without a model": Row(lambda: kl(posterior=plain()[1].replaced(model=None)), "has no model"),
    "the median of a diagonal": Row(lambda: uq.sparse.median(plain()[1]), SPARSE),
    "sparse weights of a diagonal": Row(lambda: uq.sparse.state_dict(plain()[1]), SPARSE),
    "a summary of a diagonal": Row(lambda: uq.sparse.summary(plain()[1]), SPARSE),
    "a sparse model of a diagonal": Row(lambda: uq.sparse.model(*plain()), SPARSE),
    "a summary of a model": Row(
        lambda: uq.sparse.summary(mlp()), r"takes a posterior from .*, not a Sequential"  # type: ignore[arg-type]
    ),
    "an unknown layout": Row(lambda: uq.sparse.model(*latent(), "coo"), "layout"),  # type: ignore[arg-type]
    "a sparse model of another": Row(lambda: uq.sparse.model(mlp(4), latent()[1]), "shape", OTHER),
}  # fmt: skip

ROWS = CONTEXTS | OPTIONS | FITS | POSTERIORS
assert len(ROWS) == sum(map(len, (CONTEXTS, OPTIONS, FITS, POSTERIORS)))


@pytest.mark.parametrize("name", ROWS)
def test_refusals(name: str) -> None:
    hold(ROWS[name])
