"""The loss of a latent binary training, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import log
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage]

from posthoc_uq.devices import Checks, host_double
from posthoc_uq.inference.latent_layers import LatentLayer
from posthoc_uq.inference.latent_options import LatentBinaryOptions
from posthoc_uq.inference.training import Group, Objective, Step
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.likelihoods.weights import weighed_targets
from posthoc_uq.loaders import Batch
from posthoc_uq.outputs import output_tensor
from posthoc_uq.randomness import mixed_seed
from posthoc_uq.reparametrised import AffineCalls

_NOISE, _VALIDATION = 1, 2  # streams of a step's seed


class LatentObjective(Objective):
    """``-mean w log p(y | h) + weight KL / N``, with the outputs of every layer drawn by local reparametrisation, for
    samples of the weights w, or 1.

    Args:
        twin: a replica of the model, in eval mode.
        layers: what is trained, by name.
        likelihood: of the targets.
        samples: N.
        options: of the method.
    """

    def __init__(
        self,
        twin: nn.Module,
        layers: Mapping[str, LatentLayer],
        likelihood: Likelihood,
        samples: int,
        options: LatentBinaryOptions,
    ) -> None:
        self._twin, self._layers, self._likelihood = twin, layers, likelihood
        self._samples, self._options = samples, options
        held = dict(twin.named_parameters())
        self._by_weight = {id(held[one.layer.weight]): one for one in layers.values()}
        self._device = next(iter(held.values())).device
        self._log_noise: Tensor | None = None
        if options.learn_noise:
            like = next(iter(next(iter(layers.values())).tensors.values()))
            noise = cast(Tensor, likelihood.noise_variance)
            self._log_noise = noise.log().to(like.detach()).requires_grad_()

    @property
    def network(self) -> nn.Module:
        return self._twin

    def tensors(self) -> dict[str, Tensor]:
        named = {name: t for layer in self._layers.values() for name, t in layer.named().items()}
        return named if self._log_noise is None else named | {"log noise": self._log_noise}

    def groups(self) -> list[Group]:
        rates = {
            "mean": self._options.lr,
            "bias mean": self._options.lr,
            "log variance": self._options.log_variance_lr,
            "bias log variance": self._options.log_variance_lr,
            "logit": self._options.inclusion_lr,
        }
        groups: dict[str, list[Tensor]] = {}
        for layer in self._layers.values():
            for role, tensor in layer.tensors.items():
                group = role.removeprefix("bias ") if role in rates else "flow"
                groups.setdefault(group, []).append(tensor)
        if self._log_noise is not None:
            groups["log variance"].append(self._log_noise)
        return [
            {"params": params, "lr": rates.get(name, self._options.flow_lr), "name": name}
            for name, params in groups.items()
        ]

    def likelihood(self) -> Likelihood:
        """With the noise as it is now."""
        if self._log_noise is None:
            return self._likelihood
        return self._likelihood.with_noise(host_double(self._log_noise.detach().exp()))

    def _noisy(self) -> Likelihood:
        return (
            self._likelihood
            if self._log_noise is None
            else self._likelihood.with_noise(self._log_noise.exp())
        )

    def _generator(self, *words: int) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(mixed_seed(*words))

    def weight_of(self, step: Step) -> float:
        """The factor on the divergence at a step: it rises from 0 while the training warms up."""
        warm_up = self._options.warm_up
        return self._options.divergence_weight * (min(1.0, step.progress / warm_up) if warm_up else 1.0)

    def backward(self, batch: Batch, step: Step, checks: Checks) -> dict[str, Tensor]:
        targets, generator = cast(Tensor, batch.targets), self._generator(step.seed, _NOISE)
        draws = {key: layer.draw(generator) for key, layer in self._by_weight.items()}
        copied = batch.copied()
        outputs_of = {
            key: partial(layer.outputs, draw=draws[key], generator=generator)
            for key, layer in self._by_weight.items()
        }
        with AffineCalls(outputs_of):
            outputs = output_tensor(self._twin(*copied.args, **copied.kwargs))
        targets, weights = weighed_targets(self._likelihood, outputs.detach(), targets, batch.weights)
        fault = self._likelihood.fault(outputs.detach(), targets)
        if fault is not None:
            detached = outputs.detach()
            checks.later(
                fault, lambda broken: self._likelihood.check(detached, targets) if bool(broken) else None
            )
        likelihood = self._noisy()
        scores = (
            likelihood.log_prob(outputs, targets)
            if weights is None
            else weights.log_prob(likelihood, outputs, targets)
        )
        fit = scores.mean()
        divergence = torch.stack([draw.divergence for draw in draws.values()]).sum() / self._samples
        loss = self.weight_of(step) * divergence.to(fit) - fit
        loss.backward()
        weights = sum(layer.tensors["logit"].numel() for layer in self._layers.values())
        included = torch.stack([draw.included for draw in draws.values()]).sum() / weights
        divergence, fit = divergence.detach(), fit.detach()
        return {
            "loss": loss.detach(),
            "log likelihood": fit,
            "KL": divergence,
            "mean inclusion": included,
        }

    def log_predictive(self, batch: Batch, draws: int) -> Tensor:
        log_probs: list[Tensor] = []
        for draw in range(draws):
            generator = self._generator(0, _VALIDATION, draw)
            weights = {n: t for layer in self._layers.values() for n, t in layer.sample(generator).items()}
            copied = batch.copied()
            outputs = output_tensor(functional_call(self._twin, weights, copied.args, copied.kwargs))
            targets = cast(Tensor, batch.targets)
            if draw == 0:
                self._likelihood.check(outputs, targets)
            log_probs.append(self._noisy().log_prob(outputs, targets))
        return torch.logsumexp(torch.stack(log_probs), dim=0) - log(draws)
