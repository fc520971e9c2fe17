"""The sampling head: an ensemble of models whose weights are drawn from the posterior once, and kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posthoc_uq.heads.prediction import Prediction, predict
from posthoc_uq.loaders import output_tensor
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import replicate, unwrap


class SamplingPredictor(nn.Module):
    """Predicts with `n_samples` draws of the weights.

    Every draw is a model of its own that shares all parameters without a posterior with the user's model,
    whose own weights
    are never written: predictions may run in several threads at once. Always in eval mode.

    Args:
        model: the model the posterior was fitted on.
        posterior: of any method.
        n_samples: draws of the weights.
        seed: of the draws; the same seed gives the same ensemble. None draws anew each time.
        generator: in place of a seed.

    Attributes:
        members: the drawn models.
    """

    members: nn.ModuleList

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        n_samples: int = 30,
        seed: int | None = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self._model: tuple[nn.Module] = (
            model,
        )  # a tuple hides it: moving the predictor leaves the user's model alone
        self._posterior = posterior
        self.n_samples = n_samples
        self.redraw(seed, generator)

    def redraw(self, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        """Draw the ensemble anew; predictions already under way in other threads end with the old one."""
        if generator is None and seed is not None:
            generator = torch.Generator().manual_seed(seed)
        draws = self._posterior.sample(self.n_samples, generator)
        model = unwrap(self._model[0])
        shared = {
            name: nn.Parameter(parameter.detach(), requires_grad=False)
            for name, parameter in model.named_parameters()
            if name not in draws
        }
        devices = {name: parameter.device for name, parameter in model.named_parameters()}
        with isolated_random_state():  # copying a module may run its code
            members = [
                replicate(
                    model, shared | {name: draw[index].to(devices[name]) for name, draw in draws.items()}
                )
                for index in range(self.n_samples)
            ]
        self.members = nn.ModuleList(members).eval()

    def train(self, mode: bool = True) -> SamplingPredictor:
        """Does nothing: members stay in eval mode."""
        return super().train(False)

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """The outputs of every draw, ``(n_samples, batch, ...)``; logits are divided by the temperature."""
        stacked = torch.stack([output_tensor(member(*args, **kwargs)) for member in self.members])
        return stacked if self._posterior.temperature == 1.0 else stacked / self._posterior.temperature

    def forward(self, *args: Any, **kwargs: Any) -> Prediction:
        """The prediction for a batch: `ClassPrediction` or `RegressionPrediction` by the likelihood.

        Raises:
            PosthocUQError: the likelihood is one that no prediction is defined for.
        """
        return predict(self.outputs(*args, **kwargs), self._posterior)
