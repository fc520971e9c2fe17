"""How far a posterior is from its prior over functions: a diagnostic, through the linearised head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.heads.linearized import LinearizedPredictor
from posthoc_uq.posteriors import Posterior
from posthoc_uq.trained.function_space import FunctionKL, gaussian_kl, relative_function_noise


def function_space_kl(
    posterior: Posterior,
    *inputs: Any,
    prior_precision: float | Mapping[str, float] | None = None,
    prior_mean: str = "zero",
    function_noise: float = 1e-6,
    **named_inputs: Any,
) -> FunctionKL:
    """How far a posterior is from its prior in function space, at some inputs: ``KL(q(f(X)) || p(f(X)))`` in nats.

    Both are joint Gaussians over all outputs at all inputs, by the network linearised in its weights: ``q`` around the
    posterior's mean, with the covariance ``J Sigma J^T``; ``p`` around the trained weights, with ``J J^T /
    prior_precision`` over the same layers (Rudner et al. 2022, eq. 5 and 9). If the means differ by a linear map of the
    weights, it is at most the divergence between the distributions of the weights. At equal function noise it does not
    fall when inputs are added. It is large where the data, or the objective, have determined the function.

    Args:
        posterior: of any method, fitted or loaded.
        *inputs: what the model takes, a few dozen samples: matrices of size (samples * outputs)^2 in float64.
        prior_precision: of the weights, a number or one a layer; the posterior's own by default.
        prior_mean: ``"zero"``, or ``"pretrained"`` for the trained network's outputs.
        function_noise: variance that is added to every function value, as a share of their mean prior variance; ten
            times as much where a covariance has no Cholesky factor otherwise.
        **named_inputs: of the model.

    Raises:
        PosthocUQError: the posterior has no model, or an option has no valid value.
        NonFiniteError: the covariances are not finite.
    """
    if posterior.model is None:
        raise PosthocUQError(
            "The posterior has no model; save it, and load it with the model that it was fitted on: "
            "uq.load(path, model)."
        )
    if prior_mean not in ("zero", "pretrained"):
        raise PosthocUQError(f"prior_mean must be 'zero' or 'pretrained', not {prior_mean!r}.")
    if not 0 < function_noise < float("inf"):
        raise PosthocUQError(f"function_noise must be positive and finite, not {function_noise}.")
    prior = posterior.without_data(posterior.prior_precision if prior_precision is None else prior_precision)
    moments: list[tuple[Tensor, Tensor]] = []
    for distribution in (posterior, prior):
        head = LinearizedPredictor(posterior.model, distribution, outputs="all", engine="exact")
        covariance = head.functional_covariance(*inputs, joint=True, **named_inputs)
        moments.append((head.functional_mean(*inputs, **named_inputs).flatten(), covariance))
    (mean, covariance), (trained_outputs, prior_covariance) = moments
    prior_outputs = trained_outputs if prior_mean == "pretrained" else torch.zeros_like(trained_outputs)
    return gaussian_kl(
        mean[None],
        covariance[None],
        prior_outputs[None],
        prior_covariance[None],
        float(relative_function_noise(prior_covariance[None], function_noise)),
    )
