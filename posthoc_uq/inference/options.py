"""The options that single methods take, checked before any work is done; see `posthoc_uq.fit` for what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, Literal, TypeVar, get_args

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.inference.laplace import FAMILIES
from posthoc_uq.inference.run import LaplaceOptions
from posthoc_uq.inference.sparsify import kept_entries
from posthoc_uq.inference.training import TrainingOptions
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.information import CORRECTIONS

PriorMean = Literal["zero", "pretrained", "random_init"]
Body = Literal["linearized", "sample"]

FUNCTION_SPACE = "function_space"
METHODS = (*FAMILIES, FUNCTION_SPACE)
CURVATURES = ("diag", "kfac", "efb", "inf")  # whose marginal variances a training may begin from
_BASES = ("auto", "exact", "sketch")
_LAPLACE = ("rank", "basis", "basis_fraction", "correction")  # of them, those of "inf"

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
        _at_least_one(self, "n_sets", "n_draws", *(["n_context"] if self.n_context is not None else []))
        _among(self, "prior_mean", get_args(PriorMean))
        _among(self, "body", get_args(Body))
        if self.initial is None:
            self.initial = "constant" if self.epochs else "inf"
        if isinstance(self.initial, str):
            _among(self, "initial", CURVATURES if self.epochs == 0 else ("constant", *CURVATURES))
        elif not isinstance(self.initial, Posterior) or self.epochs == 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PosthocUQError(
                f"initial must be one of {('constant', *CURVATURES)} or a fitted posterior to train on from; without "
                f"epochs the posterior comes from the curvature itself: initial='inf'."
            )
        for name in ("initial_log_variance", "initial_body_log_variance"):
            if not -80 <= getattr(self, name) <= 20:
                raise PosthocUQError(
                    f"{name} is the logarithm of a variance in [-80, 20], not {getattr(self, name)}."
                )
        for name in ("prior_body_variance", "function_noise"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise PosthocUQError(f"{name} must be finite and not negative, not {getattr(self, name)}.")
        if not self.function_noise:
            raise PosthocUQError(
                "function_noise must be positive: context points that coincide have no density."
            )


def _at_least_one(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PosthocUQError(f"{name} must be a whole number, at least 1; not {value!r}.")


def _among(options: Any, name: str, allowed: tuple[str, ...]) -> None:
    if getattr(options, name) not in allowed:
        raise PosthocUQError(f"{name} must be one of {allowed}, not {getattr(options, name)!r}.")


def method_options(
    method: str, given: Mapping[str, Any]
) -> tuple[LaplaceOptions, FunctionSpaceOptions | None]:
    """The options of the sweeps that a method makes, and those of its training, if it has one.

    An option given as None has its default.

    Raises:
        PosthocUQError: the method is unknown, or an option is not one that it takes, or has no valid value.
    """
    if method not in METHODS:
        raise PosthocUQError(f"method must be one of {sorted(METHODS)}, not {method!r}.")
    chosen = {name: value for name, value in given.items() if value is not None}
    if method == FUNCTION_SPACE:
        return LaplaceOptions(), _made(method, FunctionSpaceOptions, chosen, _names(FunctionSpaceOptions))
    options = _made(method, LaplaceOptions, chosen, list(_LAPLACE) if method == "inf" else [])
    kept_entries(options.rank, (1, 1, 1))
    _among(options, "basis", _BASES)
    if not 0 < options.basis_fraction <= 1:
        raise PosthocUQError(f"basis_fraction must be in (0, 1], not {options.basis_fraction!r}.")
    _among(options, "correction", CORRECTIONS)
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
