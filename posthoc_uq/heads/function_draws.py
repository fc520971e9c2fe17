"""Draws of the linearised model's function: ``J (theta_r - theta)`` by forward-mode differentiation."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage]

from posthoc_uq.curvature.plain_attention import PlainAttention
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.forward import jvp
from posthoc_uq.loaders import Batch
from posthoc_uq.outputs import output_tensor
from posthoc_uq.progress import in_parts

# `functional_call` puts the weights into the module for as long as it runs: calls in several threads take turns.
_SWAPPING = threading.RLock()


def function_draws(model: nn.Module, batch: Batch, deviations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs, and their derivatives along deviations of the weights.

    Args:
        model: in eval mode; nothing else may run it meanwhile.
        batch: its inputs.
        deviations: parameter name to ``(draws, *shape)``.

    Returns:
        Outputs ``(samples, ...)`` and derivatives ``(draws, samples, ...)``.

    Raises:
        PosthocUQError: some operation of the model has no forward derivative.
    """
    parameters = dict(model.named_parameters())
    centre = {name: parameters[name].detach() for name in deviations}
    draws = len(next(iter(deviations.values())))

    def run(weights: dict[str, Tensor]) -> Tensor:
        return output_tensor(
            batch.copied().call_any(lambda *args, **kwargs: functional_call(model, weights, args, kwargs))
        )

    outputs, derivatives = None, list[Tensor]()
    with _SWAPPING, torch.no_grad(), PlainAttention():
        for draw in in_parts(range(draws)):
            tangent = {name: deviation[draw] for name, deviation in deviations.items()}
            try:
                value_and_derivative = jvp(run, (centre,), (tangent,))
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                if not any(word in reason for word in ("forward AD", "forward mode", "autograd.Function")):
                    raise
                raise PosthocUQError(
                    f"engine='jvp', and draws of functions, need forward derivatives, and the model has an operation "
                    f"without one ({reason}); use engine='exact', and draw functions with head='sampling'."
                ) from error
            outputs, derivative = value_and_derivative[0], value_and_derivative[1]
            derivatives.append(derivative)
    assert outputs is not None
    return outputs, torch.stack(derivatives)
