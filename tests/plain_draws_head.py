"""A head in a file of its own, as somebody who uses the package would write it; see `test_new_method`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

import posthoc_uq as uq
from posthoc_uq.core import Batch, Count, Seed, check_option, replicate
from posthoc_uq.heads import scaled_logits


@uq.register_head
class PlainDraws(uq.Predictor):
    """Runs the model with each of some drawn sets of weights, one after the other.

    Args:
        n_draws: sets of weights.
        seed: of the draws.
        novelty: whether predictions know their novelty, if the posterior does.
    """

    head: ClassVar[str] = "plain_draws"

    def __init__(
        self,
        model: nn.Module,
        posterior: uq.Posterior,
        *,
        n_draws: Count = 6,
        seed: Seed = 0,
        novelty: bool = True,
    ) -> None:
        super().__init__(model, posterior, novelty)
        self.n_draws, self.seed = check_option("n_draws", n_draws, Count), check_option("seed", seed, Seed)
        self._twin = (replicate(model, posterior.trained_mean),)  # in a tuple: no part of this module

    @property
    def _network(self) -> nn.Module:
        return self._twin[0]

    def _apply(self, fn: Any, recurse: bool = True) -> PlainDraws:
        super()._apply(fn, recurse)
        self._network._apply(fn)
        return self

    def identity(self) -> dict[str, Any]:
        return {"head": self.head, "n_draws": self.n_draws}

    def _functions(self, batch: Batch, n: int, generator: torch.Generator) -> Tensor:
        drawn, outputs = self._posterior.sample(n, generator), list[Tensor]()
        with torch.no_grad():
            for draw in range(n):
                weights, own = {name: w[draw].to(self.device) for name, w in drawn.items()}, batch.copied()
                outputs.append(own.outputs_of(functional_call(self._network, weights, own.args, own.kwargs)))
        return torch.stack(outputs)

    def _distribution(self, batch: Batch) -> Tensor:
        return self._functions(batch, self.n_draws, torch.Generator().manual_seed(self.seed))

    def prediction_of(self, distribution: Tensor) -> uq.Prediction:
        scaled = scaled_logits(distribution, self._posterior, draws=True)
        return self._posterior.observation.from_blocks(iter([scaled]))

    def _predict(self, batch: Batch) -> uq.Prediction:
        ratio = self._known_novelty(batch)  # before the draws: a model may change its inputs
        return self.prediction_of(self._distribution(batch)).with_novelty(ratio)
