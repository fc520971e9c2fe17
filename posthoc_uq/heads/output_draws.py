"""Draws of a model's outputs by local reparametrisation: every layer's outputs are drawn, in place of its weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.fixed_part import FixedPart
from posthoc_uq.heads.inputs import Inputs
from posthoc_uq.heads.interception import ReplayError
from posthoc_uq.heads.replay import Features, check_refused_replay
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.progress import tell
from posthoc_uq.randomness import isolated_random_state, mixed_seed
from posthoc_uq.reparametrised import AffineCalls, WeightMoments, drawn_outputs
from posthoc_uq.replica import model_device, replicate

_OUTPUTS = 401  # stream of a draw's seed


class OutputDraws(nn.Module):
    """Passes of one model, in each of which the outputs of all layers with a posterior are drawn by local
    reparametrisation; see `posthoc_uq.reparametrised`.

    A draw depends on its seed and on the shapes of the batch alone. What a layer's weights have in common, like the
    factor of a flow, is drawn once for each draw; the rest is drawn anew for every sample and position.

    Args:
        model: the model that the posterior was fitted on; never written.
        posterior: its blocks know moments of independent weights.
        seeds: one for each draw.

    Attributes:
        refused: why draws do not run in one pass; always None, since that was not asked for.
        fixed_part: the part of the model before the first layer with a posterior, which runs once for a batch.
    """

    refused: str | None = None

    def __init__(self, model: nn.Module, posterior: Posterior, seeds: Sequence[int]) -> None:
        super().__init__()
        self._posterior, self._seeds = posterior, list(seeds)
        self._factors = posterior.factors()
        with isolated_random_state():  # copying a module may run its code
            self.template = replicate(model, posterior.centre)
        self._kept: dict[str, WeightMoments] = {}
        self._set_up()
        self.eval()

    def __len__(self) -> int:
        """Number of draws."""
        return len(self._seeds)

    def _set_up(self) -> None:
        """The moments that are the same in all draws, on the model's device; and no features of another one."""
        self._kept = {}
        self._kept = {name: m for name, m in self._moments(0).items() if not self._factors[name].shared}
        self.fixed_part = FixedPart(self.template, self._posterior.mean)

    def _apply(self, fn: Any, recurse: bool = True) -> OutputDraws:
        super()._apply(fn, recurse)
        self._set_up()
        return self

    def _moments(self, seed: int) -> dict[str, WeightMoments]:
        """Means and variances of all layers' weights in one draw."""
        held = dict(self.template.named_parameters())
        moments: dict[str, WeightMoments] = {}
        for index, (name, layer) in enumerate(self._posterior.layers.items()):
            if name in self._kept:
                moments[name] = self._kept[name]
                continue
            factor, like = self._factors[name], held[layer.weight]
            mean, variance = factor.independent(torch.Generator().manual_seed(mixed_seed(seed, index)))
            variances = layer.to_parameters(variance.to(like))
            means = {n: held[n].detach() for n in layer.parameter_names}
            if mean is not None:
                drawn = layer.to_parameters(mean.to(like))
                means = {n: means[n] + drawn[n] if factor.centred else drawn[n] for n in means}
            biases = () if layer.bias is None else (means[layer.bias], variances[layer.bias])
            moments[name] = WeightMoments(means[layer.weight], variances[layer.weight], *biases)
        return moments

    def members(self, start: int = 0) -> Iterator[nn.Module]:
        """Refused: there are no models with drawn weights."""
        raise PosthocUQError(
            "drawn='outputs' draws numbers in every pass, which an exported program cannot; export a predictor with "
            "drawn='weights', or with head='moments'."
        )

    def blocks(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """The outputs of all draws in order, as blocks ``(1, batch, ...)``."""
        inputs, start = Inputs(args, kwargs, None), 0
        features = self.fixed_part.features(*inputs.arguments) if len(self) > 1 else None
        if features is not None:
            try:
                for block in self.from_features(features):
                    yield block
                    start += 1
                    tell(start / len(self))
                return
            except ReplayError as error:
                check_refused_replay(error, lambda: deque(self.from_features(features), maxlen=0))
                self.fixed_part.refuse(str(error))
        for place, seed in enumerate(self._seeds[start:], start + 1):
            with self._drawing(seed):
                outputs = inputs.run(self.template)
            yield outputs.unsqueeze(0)
            tell(place / len(self))

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """What enters the part of the model that the draws change; None where that is most of the model."""
        return self.fixed_part.features(args, kwargs)

    def from_features(self, features: Features) -> Iterator[Tensor]:
        """The outputs of all draws in order, as blocks ``(1, batch, ...)``, from `features` of the same model.

        Raises:
            ReplayError: the model took another route than when the features were made.
        """
        held = {name: p for name, p in self.template.named_parameters() if name in self._posterior.mean}
        for seed in self._seeds:
            with self._drawing(seed):
                outputs = self.fixed_part.run(features, held)
            yield outputs.unsqueeze(0)

    @contextmanager
    def _drawing(self, seed: int) -> Generator[None]:
        """A context for one draw's pass.

        Raises:
            PosthocUQError: it did not use every layer once.
        """
        held, moments = dict(self.template.named_parameters()), self._moments(seed)
        generator = torch.Generator(model_device(self.template)).manual_seed(mixed_seed(seed, _OUTPUTS))
        names = {id(held[layer.weight]): name for name, layer in self._posterior.layers.items()}
        outputs_of = {
            key: partial(drawn_outputs, weights=moments[name], generator=generator)
            for key, name in names.items()
        }
        with AffineCalls(outputs_of) as calls:
            yield
        uses = {name: calls.used.count(key) for key, name in names.items()}
        wrong = next((name for name, count in uses.items() if count != 1), None)
        if wrong is not None:
            raise PosthocUQError(
                f"drawn='outputs' draws the outputs of every layer once in a pass, and '{wrong}' was used "
                f"{uses[wrong]} times by functions that it knows; take drawn='weights'."
            )
