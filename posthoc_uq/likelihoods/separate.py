"""What likelihoods have in common whose targets are independent given the outputs, each of one output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from posthoc_uq.likelihoods.base import Likelihood
from posthoc_uq.likelihoods.outputs import wide
from posthoc_uq.likelihoods.quadrature import gaussian_log_mean_exp, gaussian_mean
from posthoc_uq.predictions.links import DRAWS


class SeparateOutputs(Likelihood):
    """``log p(y | f) = sum_k log p(y_k | f_k)``: `log_terms` has the terms, and expectations are taken one by one."""

    @abstractmethod
    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Likelihood`; outputs may have dimensions before those of the targets."""

    def like(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The targets in the shape of the outputs and in their precision."""
        return targets.to(device=outputs.device, dtype=wide(outputs).dtype).reshape(outputs.shape)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        terms = self.log_terms(wide(outputs), self.like(outputs, targets))
        return terms.reshape(outputs.shape[0], -1).sum(1)

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = DRAWS
    ) -> Tensor:
        """By Gauss-Hermite quadrature for each output."""
        return self._expected(gaussian_mean, mean, variance, targets)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = DRAWS
    ) -> Tensor:
        """By Gauss-Hermite quadrature for each output; outputs count as independent."""
        return self._expected(gaussian_log_mean_exp, mean, variance, targets)

    def _expected(
        self,
        expectation: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor],
        mean: Tensor,
        variance: Tensor,
        targets: Tensor,
    ) -> Tensor:
        values = self.like(mean, targets)
        terms = expectation(lambda outputs: self.log_terms(outputs, values), wide(mean), wide(variance))
        return terms.reshape(mean.shape[0], -1).sum(1)
