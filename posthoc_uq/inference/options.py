"""The options that single methods take, checked before any work is done; see `posthoc_uq.fit` for what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.laplace import FAMILIES
from posthoc_uq.inference.run import LaplaceOptions
from posthoc_uq.inference.sparsify import checked_rank
from posthoc_uq.inference.training import TrainingOptions, check_options
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.information import CORRECTIONS
from posthoc_uq.values import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Number, flag, one_of

PriorMean = Literal["zero", "pretrained", "random_init"]
Body = Literal["linearized", "sample"]

FUNCTION_SPACE = "function_space"
METHODS = (*FAMILIES, FUNCTION_SPACE)
CURVATURES = ("diag", "kfac", "efb", "inf")  # whose marginal variances a training may begin from
_BASES = ("auto", "exact", "sketch")
_LAPLACE = ("rank", "basis", "basis_fraction", "correction")  # of them, those of "inf"

_LOG_VARIANCE = Number("the logarithm of a variance, in [-80, 20]", least=-80, most=20)
_FUNCTION_SPACE = {
    "n_context": COUNT,
    "n_sets": COUNT,
    "n_draws": COUNT,
    "initial_log_variance": _LOG_VARIANCE,
    "initial_body_log_variance": _LOG_VARIANCE,
    "prior_body_variance": NOT_NEGATIVE,
    "function_noise": POSITIVE,  # context points that coincide have no density without it
}

Options = TypeVar("Options")


@dataclass
class FunctionSpaceOptions(TrainingOptions):
    """Options of ``method="function_space"``; see `posthoc_uq.fit`."""

    context: Any = None
    n_context: int | None = None
    n_sets: int = 1
    n_draws: int = 1
    train_mean: bool = True
    learn_noise: bool = False
    initial: str | Posterior | None = None
    initial_log_variance: float = -5.0
    initial_body_log_variance: float = -20.0
    prior_mean: PriorMean = "zero"
    prior_body_variance: float = 0.0
    function_noise: float = 1e-6
    body: Body = "linearized"

    @property
    def needs_curvature(self) -> bool:
        """Whether the variances are, or begin as, those of a curvature of the data."""
        return isinstance(self.initial, str) and self.initial in CURVATURES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, _FUNCTION_SPACE)
        for name in ("train_mean", "learn_noise"):
            setattr(self, name, flag(name, getattr(self, name)))
        one_of("prior_mean", self.prior_mean, get_args(PriorMean))
        one_of("body", self.body, get_args(Body))
        if self.initial is None:
            self.initial = "constant" if self.epochs else "inf"
        if isinstance(self.initial, str):
            one_of("initial", self.initial, CURVATURES if self.epochs == 0 else ("constant", *CURVATURES))
        elif not isinstance(self.initial, Posterior) or self.epochs == 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PosthocUQError(
                f"initial must be one of {('constant', *CURVATURES)} or a fitted posterior to train on from; without "
                f"epochs the posterior comes from the curvature itself: initial='inf'."
            )


def method_options(
    method: str, given: Mapping[str, Any]
) -> tuple[LaplaceOptions, FunctionSpaceOptions | None]:
    """The options of the sweeps that a method makes, and those of its training, if it has one.

    An option given as None has its default.

    Raises:
        PosthocUQError: the method is unknown, or an option is not one that it takes, or has no valid value.
    """
    one_of("method", method, sorted(METHODS))
    chosen = {name: value for name, value in given.items() if value is not None}
    if method == FUNCTION_SPACE:
        return LaplaceOptions(), _made(method, FunctionSpaceOptions, chosen, _names(FunctionSpaceOptions))
    options = _made(method, LaplaceOptions, chosen, list(_LAPLACE) if method == "inf" else [])
    options.rank = checked_rank(options.rank)
    one_of("basis", options.basis, _BASES)
    options.basis_fraction = SHARE("basis_fraction", options.basis_fraction)
    one_of("correction", options.correction, CORRECTIONS)
    return options, None


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)]


def _made(method: str, kind: Callable[..., Options], chosen: Mapping[str, Any], names: list[str]) -> Options:
    stray = [name for name in chosen if name not in names]
    if stray:
        raise PosthocUQError(
            f"method={method!r} does not take {stray}; of these options it takes {sorted(names) or 'none'}."
        )
    return kind(**chosen)
