"""The arguments of a call of `fit`, checked before any work is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import nn

from posthoc_uq.curvature.selection import Selection, check_selection
from posthoc_uq.distributed import is_divided
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.faithful import Faithful
from posthoc_uq.inference.plain_values import as_plain
from posthoc_uq.likelihoods import Likelihood, resolve_likelihood
from posthoc_uq.loaders import BatchReader, check_loader, check_reusable
from posthoc_uq.methods import METHODS, Method, method_of
from posthoc_uq.outputs import Output, checked_output
from posthoc_uq.posteriors.blocks import BLOCKS
from posthoc_uq.replica import check_differentiable, check_not_meta, unwrap
from posthoc_uq.values import POSITIVE, SEED
from posthoc_uq.wrapping import head_class

EVIDENCE = "evidence"


@dataclass(frozen=True)
class OwnPrior:
    """The prior of single weights that was asked for, still unchecked.

    Attributes:
        precision: by the name of a parameter, or None.
        mean: a number, by the name of a parameter, or None.
    """

    precision: Mapping[str, Any] | None = None
    mean: Any = None

    def described(self) -> dict[str, Any]:
        """Lines of the report."""
        lines = {} if self.precision is None else {"prior of each weight": "given, times the prior precision"}
        number = isinstance(self.mean, (int, float))
        return lines | ({} if self.mean is None else {"prior mean": float(self.mean) if number else "given"})


@dataclass(frozen=True)
class Request:
    """Method, likelihood and prior of a fit.

    Attributes:
        method: with its options.
        likelihood: with its noise variance, if known.
        finds_noise: whether the noise variance of a regression comes from the data.
        prior: a prior precision, ``"evidence"``, or how the faithful one is found; for a training always the last.
        head: the head by which a faithful prior is found and predictions are made.
        seed: of all random numbers.
        reader: of the batches.
        output: which part of what the model returns its outputs are, if the user said so.
        own_prior: of single weights.
        by_name: whether the likelihood was given by its name, so that its parameters are its defaults.
    """

    method: Method
    likelihood: Likelihood
    finds_noise: bool
    prior: float | str | Faithful
    head: str
    seed: int
    reader: BatchReader
    output: Output | None = None
    own_prior: OwnPrior = OwnPrior()
    by_name: bool = False

    @property
    def faithful(self) -> float | None:
        """The budget of the faithful prior in nats; None where no faithful prior is to be found."""
        prior = self.prior
        return prior.divergence if isinstance(prior, Faithful) and self.likelihood.has_divergence else None

    def identity(self) -> dict[str, Any]:
        """Plain values that must be the same for one fit to go on where another stopped."""
        noise = "found from the data" if self.finds_noise else "given"
        shared = {"likelihood": as_plain(self.likelihood), "noise": noise, "head": self.head}
        faithful = self.prior.divergence if isinstance(self.prior, Faithful) else None
        prior: Any = "faithful" if isinstance(self.prior, Faithful) else self.prior
        if self.own_prior.precision is not None:
            prior = as_plain(self.own_prior.precision)
        return (
            shared
            | {"seed": self.seed, "prior of the weights": prior, "divergence": faithful}
            | self.method.identity()
        )


def requested(
    model: nn.Module,
    loader: Iterable[Any],
    method: str | Method,
    val_loader: Iterable[Any] | None,
    likelihood: str | Likelihood,
    layers: Selection | None,
    prior_precision: Any,
    head: str | None,
    options: Mapping[str, Any],
    **others: Any,
) -> Request:
    """The arguments of `fit`, after the checks that can be made before the model runs.

    Raises:
        PosthocUQError: a value is not valid, or two do not fit together; the message says how to go on.
    """
    own_names = [*(set(locals()) - {"others", "options"}), *others, "divergence", "noise_variance"]
    if torch.is_inference_mode_enabled():
        raise PosthocUQError(
            "A fit needs gradients, which torch.inference_mode() does not allow; call fit outside of it."
        )
    network = unwrap(model)
    check_not_meta(network)
    if layers is not None:
        check_selection(layers)
    seed = SEED("seed", others["seed"])
    method_options = dict(options)
    divergence = {name: method_options.pop(name) for name in ("divergence",) if name in method_options}
    noise_variance = method_options.pop("noise_variance", None)
    resolved = resolve_likelihood(likelihood, noise_variance)
    chosen, prior_mean = _chosen(method, method_options, layers, others["prior_mean"], own_names)
    own_prior = _own_prior(chosen, prior_precision, prior_mean)
    prior_precision = 1.0 if own_prior.precision is not None else prior_precision
    asked = bool(divergence) or (isinstance(prior_precision, str) and prior_precision == "faithful")
    faithful = Faithful(**divergence) if asked or chosen.narrowed else Faithful(None)
    if asked and faithful.divergence is not None and chosen.trains and "scale" not in chosen.tunable:
        raise PosthocUQError(
            f"method={chosen.name!r} keeps the variances of its training, which cannot be narrowed until predictions "
            f"are faithful; leave {'divergence' if divergence else 'prior_precision'} out of the fit."
        )
    if chosen.trains:
        chosen, prior = _of_training(chosen, prior_precision, faithful)
    else:
        of_method = getattr(chosen, "prior_precision", None)
        prior = _checked_prior(of_method if prior_precision is None else prior_precision, faithful)
    if prior_precision == "faithful" and not resolved.has_divergence:
        raise PosthocUQError(
            f"Likelihood {resolved.name!r} has no prediction that could be faithful to the network's; give "
            f"prior_precision a number or 'evidence'."
        )
    head_class(head or chosen.head)
    by_name = isinstance(likelihood, str)
    finds_noise = resolved.noise_variance is not None and by_name and noise_variance is None
    _check_loaders(loader, val_loader, chosen.passes() + finds_noise)
    reader = _reader(chosen, network, others)
    check_differentiable(network)
    output = checked_output(others["output"])
    head = head or chosen.head
    return Request(chosen, resolved, finds_noise, prior, head, seed, reader, output, own_prior, by_name)


def _reader(method: Method, network: nn.Module, others: Mapping[str, Any]) -> BatchReader:
    """What takes batches apart, for a method that may have no weights of samples."""
    functions = (others[name] for name in ("batch_to_inputs", "batch_to_targets", "batch_to_weights"))
    reader = BatchReader.of(network, *functions)
    if reader.batch_to_weights is not None:
        method.check_weights()
    return reader


def _check_loaders(loader: Iterable[Any], val_loader: Iterable[Any] | None, sweeps: int) -> None:
    check_loader(loader)
    check_reusable(loader, sweeps)
    if val_loader is not None:
        check_loader(val_loader, "val_loader")
        if is_divided(val_loader):
            raise PosthocUQError(
                "Every process tunes by itself: give all of them the whole val_loader, not a part of it."
            )


def takes_layers(method: str) -> bool:
    """Whether a method by this name has an option `layers`, which the fit's own stands for."""
    return _has_field(method, "layers")


def _has_field(method: str, name: str) -> bool:
    return any(field.name == name for field in fields(METHODS[method])) if method in METHODS else False


def _chosen(
    method: str | Method,
    options: dict[str, Any],
    layers: Selection | None,
    prior_mean: Any,
    own_names: list[str],
) -> tuple[Method, Any]:
    """The method, with those of the fit's own arguments that are its options, too; and the prior mean if it is not."""
    if isinstance(method, str):
        if takes_layers(method) and layers in ("last", "all"):
            options.setdefault("layers", layers)
        if prior_mean is not None and _has_field(method, "prior_mean"):
            return method_of(method, options | {"prior_mean": prior_mean}, own_names), None
    return method_of(method, options, own_names), prior_mean


def _own_prior(method: Method, precision: Any, mean: Any) -> OwnPrior:
    """The prior of single weights.

    Raises:
        PosthocUQError: posteriors of the method cannot have it.
    """
    kinds = [BLOCKS[kind] for kind in method.block_kinds if kind in BLOCKS]
    with_prior = all("prior_precision" in kind.tunable for kind in kinds) and not method.trains
    if mean is not None and not with_prior:
        raise PosthocUQError(
            f"prior_mean enters the log marginal likelihood of a Laplace posterior alone, and method={method.name!r} "
            f"has none; leave it out of the fit."
        )
    if not isinstance(precision, Mapping):
        return OwnPrior(None, mean)
    if not with_prior:
        raise PosthocUQError(
            f"method={method.name!r} takes one number as prior_precision, not one a weight; take method='diag', 'full' "
            f"or 'inf'."
        )
    if not all(kind.own_priors for kind in kinds) and not _by_layer(cast(Mapping[Any, Any], precision)):
        raise PosthocUQError(
            f"A prior precision of each weight is not diagonal in the Kronecker basis of method={method.name!r}; take "
            f"method='diag', 'full' or 'inf', or fit with one number and then set posterior.prior_precision = "
            f"{{layer: number, ...}}."
        )
    return OwnPrior(cast(Mapping[str, Any], precision), mean)


def _by_layer(precision: Mapping[Any, Any]) -> bool:
    """Whether a mapping gives plain numbers, as one by layer does; its names are looked at when layers are known."""
    return all(isinstance(value, (int, float)) for value in precision.values())


def _of_training(method: Method, prior_precision: Any, faithful: Faithful) -> tuple[Method, Faithful]:
    """A training method with the prior precision of the fit, and the budget to which its variances are narrowed."""
    if prior_precision == EVIDENCE:
        raise PosthocUQError(
            "A training has no log marginal likelihood to find the prior precision by; give prior_precision a number."
        )
    if isinstance(prior_precision, Faithful):
        return method, prior_precision
    if prior_precision is not None and prior_precision != "faithful":
        changed: dict[str, Any] = {"prior_precision": _checked_number(prior_precision)}
        if getattr(method, "prior_precision", 0.0) is not None:  # there is no such field, or it has a value
            raise PosthocUQError(
                f"prior_precision is given to the fit, and method={method.name!r} has one of its own or takes none; "
                f"leave it out of the fit."
            )
        method = replace(method, **changed)
    return method, faithful


def _checked_prior(prior_precision: Any, faithful: Faithful) -> float | str | Faithful:
    if isinstance(prior_precision, Faithful):
        prior = prior_precision
    elif prior_precision is None or prior_precision == "faithful":
        prior = faithful
    elif prior_precision == EVIDENCE:
        prior = EVIDENCE
    else:
        prior = _checked_number(prior_precision)
    if isinstance(prior, Faithful) and prior.divergence is None:
        raise PosthocUQError(
            "divergence=None leaves the variances that a training found as they are, and this method trains none; it "
            "has a prior precision instead: choose prior_precision='evidence' or a number."
        )
    return prior


def _checked_number(prior_precision: Any) -> float:
    if isinstance(prior_precision, str):
        raise PosthocUQError(
            f"prior_precision must be a positive number, 'faithful' or 'evidence', not {prior_precision!r}."
        )
    return POSITIVE("prior_precision", prior_precision)
