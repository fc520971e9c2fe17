"""Draws of a predictor's function, and of what they predict: for Thompson sampling, and for whatever has no formula."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from posthoc_uq.heads.finite import check_finite
from posthoc_uq.heads.prediction import divisor_of
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.predictions.draws import symmetric_root
from posthoc_uq.predictions.samples import at_least_float32
from posthoc_uq.values import COUNT

DRAWS = 100  # by default


class DrawnFunctions(ABC):
    """The part of a predictor that draws functions."""

    if TYPE_CHECKING:
        head: ClassVar[str]

        @property
        def posterior(self) -> Posterior: ...

        def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch: ...

        def _snapshot(self) -> Posterior: ...

        def explaining(self, batch: Batch) -> AbstractContextManager[None]: ...

    @abstractmethod
    def _functions(self, posterior: Posterior, batch: Batch, n: int, generator: torch.Generator) -> Tensor:
        """See `functional_samples`; `posterior` is a snapshot, whose settings do not change."""

    def functional_samples(
        self, *args: Any, n_samples: int = DRAWS, generator: torch.Generator | None = None, **kwargs: Any
    ) -> Tensor:
        """Draws of the outputs ``f(x)``, ``(n_samples, batch, ...)``, in float32 at least, in units of the outputs;
        logits are not divided by the temperature.

        * ``head="sampling"``: ``f(x; theta_s)`` for draws of the weights.
        * ``head="linearized"``: ``f(x; theta) + J(x) (theta_s - theta)`` for the same draws, by forward-mode
          differentiation: all outputs, whatever `outputs` says.
        * ``head="moments"``: of the Gaussian of each input, by itself.

        Under the first two heads the s-th draw is one function at all inputs of the batch, and at those of another call
        with a generator of the same seed. All draws are made with the posterior's present settings.

        Args:
            *args: what the model takes.
            n_samples: how many.
            generator: of the draws; without one they differ from call to call. The global random state is left alone.
            **kwargs: of the model.

        Raises:
            NonFiniteError: a draw is not finite.
            PosthocUQError: no draw is asked for, or an operation of the model has no forward derivative.
        """
        return self._checked_draws(self._batch(args, kwargs), n_samples, _given(generator))

    def predictive_samples(
        self,
        *args: Any,
        n_samples: int = DRAWS,
        generator: torch.Generator | None = None,
        targets: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """What each of the `functional_samples` predicts, at the posterior's temperature and noise variance.

        Args:
            *args: what the model takes.
            n_samples: how many.
            generator: as in `functional_samples`.
            targets: draw targets too: one label or value from ``p(y | f_s(x))`` for every draw and input.
            **kwargs: of the model.

        Returns:
            By default the mean of the target under each draw: probabilities ``(n_samples, batch, classes)``, or values
            ``(n_samples, batch, ...)`` without observation noise. With `targets` labels ``(n_samples, batch)``, or
            values with noise.

        Raises:
            NonFiniteError: a draw is not finite.
            PosthocUQError: as for `functional_samples`; or the likelihood does not say what it predicts.
        """
        generator, posterior = _given(generator), self.posterior
        functions = self._checked_draws(self._batch(args, kwargs), n_samples, generator) / divisor_of(
            posterior
        )
        likelihood = posterior.observation
        if not targets:
            predictions: list[Any] = [likelihood.from_draws(f[None]) for f in functions]
            return torch.stack([p.probs if hasattr(p, "probs") else p.mean for p in predictions])
        shape, limit = functions.shape[:2], 2**63 - 1
        keys = torch.randint(-limit, limit, shape, generator=generator, device=generator.device)
        return torch.stack(
            [likelihood.draw(f, own.to(f.device), 0) for f, own in zip(functions, keys, strict=True)]
        )

    def _checked_draws(self, batch: Batch, n_samples: int, generator: torch.Generator) -> Tensor:
        count, posterior = COUNT("n_samples", n_samples), self._snapshot()
        with self.explaining(batch):
            functions = at_least_float32(self._functions(posterior, batch, count, generator))
        check_finite({"samples": functions.transpose(0, 1)}, "functional samples", self.head)
        return functions


def _given(generator: torch.Generator | None) -> torch.Generator:
    """The generator, or a new one that nobody else has."""
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    return generator


def gaussian_draws(outputs: Any, n: int, generator: torch.Generator) -> Tensor:
    """Draws ``(n, batch, ...)`` of Gaussian outputs, independent between inputs.

    Args:
        outputs: mean, variance and covariance, as `GaussianOutputs`.
        n: how many.
        generator: of the draws.
    """
    mean, variance = at_least_float32(outputs.mean), at_least_float32(outputs.variance)

    def normals(*shape: int) -> Tensor:
        drawn = torch.randn(n, *shape, generator=generator, dtype=torch.float64, device=generator.device)
        return drawn.to(mean.device, mean.dtype)

    covariance = outputs.covariance
    if covariance is None:
        deviations = variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt() * normals(*mean.shape)
    else:
        root = symmetric_root(cast(Tensor, covariance)).to(mean)
        deviations = torch.einsum("bkr,sbr->sbk", root, normals(len(mean), root.shape[2]))
    return mean + deviations.reshape(n, *mean.shape)
