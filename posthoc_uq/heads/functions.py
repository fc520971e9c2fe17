"""Draws of the linearised function, and its gradients by the inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils._pytree import tree_map

from posthoc_uq.core.batches import Batch, holds_samples
from posthoc_uq.core.errors import PosthocUQError, check_refused
from posthoc_uq.core.model import jvp
from posthoc_uq.core.outputs import output_tensor
from posthoc_uq.core.progress import in_parts
from posthoc_uq.layers.calls import PlainAttention
from posthoc_uq.layers.frozen import called
from posthoc_uq.posteriors import Posterior

# The linearised model's outputs as differentiable functions of its inputs: ``N(f(x), J(x) Sigma J(x)^T)``
# with the Jacobian of every sample formed as a tensor.
#
# That is for acquisition functions, of a few inputs at a time. Predictions that nobody differentiates take
# the other engines, which form no Jacobian.

Weights = dict[str, Tensor]


def differentiable_outputs(
    model: nn.Module, posterior: Posterior, batch: Batch, samples: int, joint: bool = False
) -> tuple[Tensor, Tensor]:
    """Outputs ``(samples, ...)``, and their covariance ``(samples, outputs, outputs)``, or with `joint`
    ``(samples * outputs, samples * outputs)``, with their graphs back to the inputs.

    Args:
        model: at the posterior's mean, in eval mode; nothing else may run it meanwhile.
        posterior: a snapshot.
        batch: the model's arguments.
        samples: in the batch.
        joint: also between samples.
    """
    names = {name for layer in posterior.layers.values() for name in layer.parameter_names}
    weights = {name: p.detach() for name, p in model.named_parameters() if name in names}
    outputs = called(model, weights, batch)
    jacobians = _jacobians(model, weights, batch, samples)
    by_layer = {
        name: layer.to_matrix(jacobians[layer.weight], None if layer.bias is None else jacobians[layer.bias])
        for name, layer in posterior.layers.items()
    }
    if joint:
        return outputs, posterior.quadratic({name: j.flatten(0, 1) for name, j in by_layer.items()})
    parts = [posterior.quadratic({name: j[row] for name, j in by_layer.items()}) for row in range(samples)]
    return outputs, torch.stack(parts)


def _jacobians(model: nn.Module, weights: Weights, batch: Batch, samples: int) -> Weights:
    """The Jacobian of every sample's outputs by each parameter, ``(samples, outputs, *shape)``: all samples in one
    `vmap`, or one by one for a model that cannot run in it.
    """

    def of_one(weights: Weights, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor:
        return called(model, weights, Batch(args, None, dict(kwargs))).flatten()

    def one_by_one() -> Weights:
        rows = [batch.narrow(row, 1, samples) for row in range(samples)]
        parts = [_by_autograd(lambda w, b=one: of_one(w, b.args, b.kwargs), weights) for one in rows]
        return {name: torch.stack([part[name] for part in parts]) for name in weights}

    def in_one_vmap() -> Weights:
        dims = tree_map(
            lambda value: 0 if holds_samples(value, samples) else None, (batch.args, batch.kwargs)
        )

        def in_vmap(args: tuple[object, ...], kwargs: dict[str, object]) -> Weights:
            places = tree_map(lambda v, d: v.unsqueeze(0) if d == 0 else v, (args, kwargs), dims)
            return jacrev(of_one)(weights, *places)

        return vmap(in_vmap, in_dims=dims)(batch.args, batch.kwargs)

    with PlainAttention():
        try:
            return in_one_vmap()
        except Exception as error:  # the model's code decides what vmap makes of it
            check_refused(error, in_one_vmap, one_by_one)
            return one_by_one()


def _by_autograd(run: Callable[[Weights], Tensor], weights: Weights) -> Weights:
    """The Jacobian of ``run`` by the weights, one backward pass an output, with its graph."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    outputs = run(leaves)
    rows = [
        torch.autograd.grad(
            output, list(leaves.values()), create_graph=True, allow_unused=True, materialize_grads=True
        )
        for output in outputs
    ]
    return {name: torch.stack(parts) for name, parts in zip(leaves, zip(*rows, strict=True), strict=True)}


# Draws of the linearised model's function: ``J (theta_r - theta)`` by forward-mode differentiation.


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
    with torch.no_grad(), PlainAttention():
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
