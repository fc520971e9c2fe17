"""The divergence between Gaussians over function values, and their covariance by a network's last layer.

All in float64: a covariance of K function values has rank H + 1 at most, and the result depends on its smallest
eigenvalues.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posthoc_uq.devices import as_double
from posthoc_uq.errors import NonFiniteError

_TRIES = 5  # of the Cholesky factors; the function noise grows tenfold with each


@dataclass(frozen=True)
class FunctionKL:
    """``KL(q || p)`` over the function values at some inputs, in nats.

    Attributes:
        mean_part: ``(m_q - m_p)^T C_p^-1 (m_q - m_p) / 2``, a scalar or one number a set.
        covariance_part: ``(tr C_p^-1 C_q - K + log det C_p - log det C_q) / 2``, likewise.
        function_noise: the variance that was added to every function value, likewise.
        raised: that variance as a multiple of the one that was asked for.
    """

    mean_part: Tensor
    covariance_part: Tensor
    function_noise: Tensor
    raised: int = 1

    @property
    def total(self) -> Tensor:
        """Both parts."""
        return self.mean_part + self.covariance_part

    def __str__(self) -> str:
        total, mean, covariance, noise = (
            float(part.detach())
            for part in (self.total, self.mean_part, self.covariance_part, self.function_noise)
        )
        return (
            f"KL {total:.4g} nats: mean part {mean:.4g}, covariance part {covariance:.4g}, at a function noise of "
            f"{noise:.2g}"
        )


def last_layer_covariance(
    features: Tensor, weight_variances: Tensor, bias_variances: Tensor | None = None
) -> Tensor:
    """Covariance of the function values by an independent Gaussian over the weights of a last layer ``W phi + b``.

    Values of different outputs are independent, so there is one matrix an output: ``C_q = Phi diag(s_q) Phi^T + b_q 1
    1^T`` (Rudner et al. 2022, eq. 13; one bias is shared by all inputs, so its variance enters every entry).

    Args:
        features: ``(*sets, inputs, H)``.
        weight_variances: ``(outputs, H)``.
        bias_variances: ``(outputs,)``, or None for a layer without bias.

    Returns:
        ``(*sets, outputs, inputs, inputs)`` in float64, differentiable in all of them.
    """
    wide, weights = as_double(features), as_double(weight_variances)
    inputs = wide.shape[-2]
    if len(weights) <= inputs:
        wide = wide.unsqueeze(-3)
        covariance = (wide * weights.unsqueeze(-2)) @ wide.transpose(-1, -2)
    else:  # many outputs: (pairs of inputs, H) is smaller than (outputs, inputs, H), and one product does all outputs
        first, second = torch.tril_indices(inputs, inputs, device=wide.device)
        products = wide.index_select(-2, first) * wide.index_select(-2, second)
        place = torch.empty(inputs, inputs, dtype=torch.long, device=wide.device)
        place[first, second] = place[second, first] = torch.arange(len(first), device=wide.device)
        pairs = weights @ products.transpose(-1, -2)
        covariance = pairs.index_select(-1, place.flatten()).unflatten(-1, (inputs, inputs))
    return covariance if bias_variances is None else covariance + as_double(bias_variances)[:, None, None]


def last_layer_variances(
    features: Tensor, weight_variances: Tensor, bias_variances: Tensor | None = None
) -> Tensor:
    """The diagonals of `last_layer_covariance`: ``(*sets, inputs, outputs)`` in float64, differentiable likewise."""
    variances = as_double(features).square() @ as_double(weight_variances).T
    return variances if bias_variances is None else variances + as_double(bias_variances)


_LEAST_RATIO = 1e-12
"""Function values that no weight moves, as those of a black image without biases, are as good as certain: their
divergence is this one's, and has no gradient."""


def marginal_kl(mean: Tensor, variances: Tensor, prior_mean: Tensor, prior_variance: float) -> FunctionKL:
    """``sum_kq KL(N(m_kq, v_kq) || N(p_kq, s))`` over inputs and outputs, from the marginals alone:

        KL = ((m - p)^2 / s + v / s - 1 - log(v / s)) / 2

    Args:
        mean: ``(sets, inputs, outputs)``.
        variances: likewise, positive.
        prior_mean: likewise.
        prior_variance: s.

    Returns:
        One divergence a set, without a function noise.
    """
    difference = as_double(mean) - as_double(prior_mean)
    ratio = (variances / prior_variance).clamp(min=_LEAST_RATIO)
    mean_part = 0.5 * (difference.square() / prior_variance).sum(dim=(-2, -1))
    covariance_part = 0.5 * (ratio - 1 - ratio.log()).sum(dim=(-2, -1))
    return FunctionKL(mean_part, covariance_part, torch.zeros_like(mean_part.detach()))


def relative_function_noise(prior_covariance: Tensor, share: float) -> Tensor:
    """A share of the mean prior variance of the function values, one number a set: ``(*sets, 1, 1, 1)``."""
    diagonal = prior_covariance.detach().diagonal(dim1=-2, dim2=-1)
    return share * diagonal.mean(dim=(-2, -1))[..., None, None, None]


def gaussian_kl(
    mean: Tensor, covariance: Tensor, prior_mean: Tensor, prior_covariance: Tensor, noise: Tensor | float
) -> FunctionKL:
    """``KL(N(m_q, C_q + e I) || N(m_p, C_p + e I))``, summed over independent outputs.

    Where a matrix has no Cholesky factor at the function noise ``e``, ten times as much is tried, four times at most.
    ``e`` is a variance of the function values: a difference of means that no function of the prior can have costs its
    square times ``1 / (2 e)``.

    Args:
        mean: ``(*sets, outputs, inputs)``.
        covariance: ``(*sets, outputs, inputs, inputs)``.
        prior_mean: broadcasts to `mean`.
        prior_covariance: broadcasts to `covariance`; one output stands for all.
        noise: ``e``, broadcasts to ``(*sets, 1, 1, 1)``.

    Returns:
        One divergence a set.

    Raises:
        NonFiniteError: the matrices have no Cholesky factor after all.
    """
    mean, covariance = as_double(mean), as_double(covariance)
    prior_mean, prior_covariance = as_double(prior_mean), as_double(prior_covariance)
    inputs = covariance.shape[-1]
    eye = torch.eye(inputs, dtype=torch.float64, device=covariance.device)
    noise = torch.as_tensor(noise, dtype=torch.float64, device=covariance.device)
    raised = 1
    for _ in range(_TRIES):
        root, failed = torch.linalg.cholesky_ex(covariance + noise * eye)
        prior_root, prior_failed = torch.linalg.cholesky_ex(prior_covariance + noise * eye)
        if not bool(failed.any() | prior_failed.any()):
            break
        noise, raised = noise * 10, raised * 10
    else:
        finite = bool(torch.isfinite(covariance).all() & torch.isfinite(prior_covariance).all())
        raise NonFiniteError(
            "The covariance of the function values at the context points "
            + (
                "has no Cholesky factor; give a larger function_noise, fewer or less alike context points or, if the "
                "loss has grown before, smaller learning rates."
                if finite
                else "is not finite; look at the context points and the learning rates."
            )
        )
    whitened = torch.linalg.solve_triangular(prior_root, root, upper=False)
    difference = (prior_mean - mean).unsqueeze(-1)
    shifted = torch.linalg.solve_triangular(
        prior_root.expand(*difference.shape[:-2], inputs, inputs), difference, upper=False
    )
    log_determinants = _log_diagonal(prior_root).expand(covariance.shape[:-2]) - _log_diagonal(root)
    covariance_part = 0.5 * (whitened.square().sum(dim=(-2, -1)) - inputs) + log_determinants
    mean_part = 0.5 * shifted.square().sum(dim=(-2, -1))
    sets = covariance_part.shape[:-1]
    return FunctionKL(
        mean_part.sum(-1),
        covariance_part.sum(-1),
        noise.detach().reshape(-1).expand(max(1, sets.numel())).reshape(sets),
        raised,
    )


def _log_diagonal(root: Tensor) -> Tensor:
    return root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
