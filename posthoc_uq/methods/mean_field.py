"""Independent Gaussians over a network's parameters as tensors to train, and a network that runs with them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import log
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage]

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.outputs import output_tensor
from posthoc_uq.layers.layer import Layer
from posthoc_uq.posteriors.block import Block
from posthoc_uq.posteriors.variational import MeanFieldBlock

LOG_VARIANCE = "log variance "  # followed by the name of a parameter

_AGREE = {torch.float64: 1e-8, torch.float32: 1e-4}  # relative difference by rounding


class MeanField:
    """``N(mean, diag exp(log_variance))`` over parameters by name.

    Args:
        means: leaf tensors, trained in place if `train_mean` is set.
        log_variances: likewise, always trained; a parameter without one is certain.
        train_mean: whether the means are trained.
    """

    def __init__(self, means: dict[str, Tensor], log_variances: dict[str, Tensor], train_mean: bool) -> None:
        self.means = {name: mean.requires_grad_(train_mean) for name, mean in means.items()}
        self.log_variances = {name: value.requires_grad_() for name, value in log_variances.items()}
        self.train_mean = train_mean

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is trained, by name."""
        means = {f"mean {name}": t for name, t in self.means.items()} if self.train_mean else {}
        return means | {f"{LOG_VARIANCE}{name}": t for name, t in self.log_variances.items()}

    def groups(self, lr: float, log_variance_lr: float) -> list[dict[str, Any]]:
        """The optimiser's groups: the means, if they are trained, and the log variances; certain parameters apart."""
        variances = {
            "params": list(self.log_variances.values()),
            "lr": log_variance_lr,
            "name": "log variances",
        }
        if not self.train_mean:
            return [variances]
        uncertain = [mean for name, mean in self.means.items() if name in self.log_variances]
        certain = [mean for name, mean in self.means.items() if name not in self.log_variances]
        groups = [{"params": uncertain, "lr": lr, "name": "means"}, variances]
        return groups + ([{"params": certain, "lr": lr, "name": "certain"}] if certain else [])

    @torch.no_grad()
    def deviations(self, generator: torch.Generator) -> dict[str, Tensor]:
        """One draw of ``sigma e`` for all parameters, with a standard normal ``e`` for every number; without gradients,
        see `add_gradients`.
        """
        drawn: dict[str, Tensor] = {}
        for name, value in self.log_variances.items():
            normal = torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device)
            drawn[name] = normal.mul_((0.5 * value).exp_())
        return drawn

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """One draw of all parameters."""
        deviations = self.deviations(generator)
        means = {name: mean.detach() for name, mean in self.means.items()}
        return {name: mean + deviations[name] if name in deviations else mean for name, mean in means.items()}

    @torch.no_grad()
    def add_gradients(self, name: str, gradient: Tensor, deviation: Tensor | None, *, mean: bool) -> None:
        """Carry a gradient by ``mean + sigma e`` over to the mean (if asked) and the log variance: reparameterisation
        (Kingma, Welling 2014), with ``d (sigma e) / d log sigma^2 = sigma e / 2``.

        By hand, since autograd would keep sigma, e and their product in memory. Without a deviation the parameter is
        certain, and the mean alone has a gradient.
        """
        if deviation is None:
            _add(self.means[name], gradient)
            return
        if mean and self.train_mean:
            _add(self.means[name], gradient)
            by_variance = gradient * deviation
        else:
            by_variance = gradient.mul_(deviation)
        _add(self.log_variances[name], by_variance.mul_(0.5))

    def on_backward(
        self, leaves: dict[str, Tensor], deviations: Mapping[str, Tensor] | None = None, *, mean: bool
    ) -> None:
        """Let a backward pass carry every leaf's gradient over as soon as it is complete, and drop the leaf from
        `leaves`: to keep them all to the end would take another copy of the model.

        Args:
            leaves: weights, or deviations, by name of their parameter.
            deviations: by which the weights differ from their means; None where the leaves are deviations.
            mean: see `add_gradients`.
        """

        def carry(leaf: Tensor, name: str) -> None:
            gradient, leaf.grad = leaf.grad, None
            del leaves[name]
            if gradient is not None:
                deviation = leaf.detach() if deviations is None else deviations.get(name)
                self.add_gradients(name, gradient, deviation, mean=mean)
            leaf.data = leaf.new_empty(0)  # the graph still refers to the leaf, but needs it no more

        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(partial(carry, name=name))

    def trained_mean(self) -> dict[str, Tensor] | None:
        """The means by parameter, if they are trained."""
        return {name: mean.detach() for name, mean in self.means.items()} if self.train_mean else None

    def blocks(self, layers: Mapping[str, Layer], samples: int) -> dict[str, Block]:
        """The variances as blocks of a posterior."""
        blocks: dict[str, Block] = {}
        for name, layer in layers.items():
            variances = [
                self.log_variances[p].detach().exp()
                if p in self.log_variances
                else torch.zeros_like(self.means[p])
                for p in layer.parameter_names
            ]
            matrix = layer.to_matrix(variances[0], variances[1] if len(variances) > 1 else None)
            blocks[name] = MeanFieldBlock(matrix.contiguous(), samples)
        return blocks


def gaussian_divergence(
    means: Mapping[str, Tensor],
    log_variances: Mapping[str, Tensor],
    variances: Mapping[str, Tensor],
    prior_means: Mapping[str, Tensor],
    precision: float,
) -> Tensor:
    """``KL(N(mu, diag sigma^2) || N(mu_p, I / tau))`` in nats, a scalar.

    ``1/2 sum(tau (sigma^2 + (mu - mu_p)^2) - 1 - log(tau sigma^2))``.

    Args:
        means: mu, by parameter; those without a variance are certain, and have no prior.
        log_variances: of the weights.
        variances: their exponentials.
        prior_means: those of ``mu_p`` that are not zero.
        precision: tau.
    """
    parts: list[Tensor] = []
    for name, variance in variances.items():
        mean = means[name]
        moved = mean - prior_means[name] if name in prior_means else mean
        spread = variance.sum() + moved.square().sum()
        parts.append(precision * spread - log_variances[name].sum() - mean.numel() * (1 + log(precision)))
    return 0.5 * torch.stack(parts).sum()


class FeatureNetwork:
    """A replica of a model that runs with given weights, and also gives the inputs of its last layer.

    Args:
        twin: a replica for this network alone, in eval mode.
        layers: the candidates for its last layer.
        batch: a few samples by which the last layer is found.

    Attributes:
        last: the layer ``W phi + b`` whose outputs are the model's.

    Raises:
        PosthocUQError: no layer's outputs are the model's.
    """

    def __init__(self, twin: nn.Module, layers: Mapping[str, Layer], batch: Batch) -> None:
        self.twin = twin
        self._features: Tensor | None = None
        self.last = self._last_layer(layers, batch)
        dict(twin.named_modules())[_owner(self.last)].register_forward_pre_hook(self._catch)

    def _catch(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._features = args[0]

    def _last_layer(self, layers: Mapping[str, Layer], batch: Batch) -> Layer:
        modules = dict(self.twin.named_modules())
        inputs: dict[str, list[Tensor]] = {name: [] for name in layers}
        handles: list[Any] = []
        for name, layer in layers.items():

            def catch(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                inputs[name].append(args[0].detach().clone())

            if _owner(layer) in modules:
                handles.append(modules[_owner(layer)].register_forward_pre_hook(catch))
        with torch.no_grad():
            outputs = batch.copied().call(self.twin)
        for handle in handles:
            handle.remove()
        expected, parameters = (
            outputs.flatten(1) if outputs.ndim > 1 else outputs.unsqueeze(1),
            dict(self.twin.named_parameters()),
        )
        for name, layer in reversed(list(layers.items())):
            if len(inputs[name]) != 1 or layer.groups != 1 or layer.outputs != expected.shape[1]:
                continue
            rows = inputs[name][0].flatten(1)
            weight = parameters[layer.weight].detach().flatten(1)
            if rows.shape != (len(expected), weight.shape[1]):
                continue
            affine = rows @ weight.T
            affine = affine if layer.bias is None else affine + parameters[layer.bias].detach()
            if bool(
                (affine - expected).abs().max()
                <= _AGREE.get(affine.dtype, 1e-2) * affine.abs().max().clamp(min=1e-6)
            ):
                return layer
        raise PosthocUQError(
            f"method='function_space' treats the last layer exactly, and none of {list(layers)[-3:]} gives the model's "
            f"outputs as W phi + b. Let the model return what its last Linear layer gives, and have that layer among "
            f"the chosen ones."
        )

    def outputs(self, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The model's outputs with these weights, in their own shape."""
        copy = batch.copied()
        outputs = output_tensor(functional_call(self.twin, dict(weights), copy.args, copy.kwargs))
        self._features = None
        return outputs

    def __call__(self, weights: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Outputs ``(samples, outputs)`` and features ``(samples, H)``."""
        copy = batch.copied()
        outputs = output_tensor(functional_call(self.twin, dict(weights), copy.args, copy.kwargs))
        features, self._features = self._features, None
        assert features is not None
        return outputs.reshape(len(features), -1), features.flatten(1)


def _add(leaf: Tensor, gradient: Tensor) -> None:
    leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)


def _owner(layer: Layer) -> str:
    """The name of the module that holds a layer's weight."""
    return layer.weight.rpartition(".")[0]
