"""The correction that gives a head's variances the scale that Monte Carlo over the weights finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import exp
from typing import Any

import torch
from torch import Tensor, nn

from posthoc_uq.devices import as_double
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.prediction import divisor_of
from posthoc_uq.heads.sampling import SamplingPredictor
from posthoc_uq.loaders import Bar, BatchFunction, BatchReader, batches, check_loader
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.settings import ABOUT
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.warned import warn_user


@dataclass(frozen=True)
class Calibration:
    """``sd -> exp(alpha) sd^beta``.

    Attributes:
        alpha: log of the factor on standard deviations.
        beta: their power; 1 unless a slope was fitted.
        residual: mean ``|sd / sd_MC - 1|`` with the correction, on inputs that it was not fitted on.
        before: the same without the correction.
        n_mc: draws of the weights; sd_MC alone has a relative error of ``1 / sqrt(2 n_mc)``.
    """

    alpha: float
    beta: float
    residual: float
    before: float
    n_mc: int

    def __str__(self) -> str:
        power = "" if self.beta == 1.0 else f" sd^{self.beta:.2f}"
        return (
            f"calibrated: factor {exp(self.alpha):.3g}{power} on standard deviations, error left "
            f"{self.residual:.0%} (was {self.before:.0%}, Monte Carlo's own {(2 * self.n_mc) ** -0.5:.0%})"
        )

    def apply(self, variance: Tensor) -> Tensor:
        """The corrected variance."""
        scaled = variance if self.beta == 1.0 else variance.clamp(min=0) ** self.beta
        return scaled * exp(2 * self.alpha)

    def attributes(self, posterior: Posterior, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The fields as plain values, with the settings of the posterior and the head that they hold for."""
        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "residual": self.residual,
            "before": self.before,
            "n_mc": self.n_mc,
            "head": dict(settings),
            "posterior": posterior_settings(posterior),
        }


def posterior_settings(posterior: Posterior) -> dict[str, Any]:
    """What a propagated variance depends on beside the blocks: all but the temperature, which divides it afterwards."""
    return {name: value for name, value in posterior.settings.plain().items() if ABOUT[name].of_weights}


def fitting_calibration(posterior: Posterior, settings: Mapping[str, Any]) -> Calibration | None:
    """The calibration in a posterior's record, or None if it was made for other settings of the head.

    One made before the posterior's settings changed is not used, with a warning.
    """
    recorded = posterior.history.calibration
    if not recorded or recorded["head"] != dict(settings):
        return None
    if recorded["posterior"] != posterior_settings(posterior):
        warn_user(
            "The posterior's scale or prior precision changed after calibrate(); the calibration is not used. "
            "Calibrate again."
        )
        return None
    return Calibration(
        float(recorded["alpha"]),
        float(recorded["beta"]),
        float(recorded["residual"]),
        float(recorded["before"]),
        int(recorded["n_mc"]),
    )


def calibrate(
    model: nn.Module,
    posterior: Posterior,
    variance: Callable[..., Tensor],
    output_map: Callable[[Tensor], Tensor] | None,
    loader: Iterable[Any],
    n_mc: int,
    slope: bool,
    samples: int,
    batch_to_inputs: BatchFunction | None,
    progress: bool,
) -> Calibration:
    """Compare a head's variances with those over `n_mc` draws of the weights; see `MomentsPredictor.calibrate`."""
    if n_mc < 2 or samples < 2:
        raise PosthocUQError(
            f"Calibration needs at least 2 draws and 2 inputs, not n_mc={n_mc}, samples={samples}."
        )
    check_loader(loader)
    posterior = posterior.snapshot()
    sampler = SamplingPredictor(model, posterior, n_samples=n_mc, seed=0, keep="seeds")
    reader = BatchReader.of(model, batch_to_inputs)
    by_head: list[Tensor] = []
    by_draws: list[Tensor] = []
    seen = 0
    with torch.no_grad(), isolated_random_state(), Bar(loader, "calibrate", progress) as bar:
        for batch in batches(loader, reader):
            count = next((t.shape[0] for t in batch.tensors() if t.ndim > 0), 0)
            if seen + count > samples:
                batch = batch.narrow(0, samples - seen, count)
            by_head.append(as_double(variance(*batch.args, **batch.kwargs)).cpu())
            outputs = sampler.outputs(*batch.args, **batch.kwargs) * divisor_of(posterior)
            if output_map is not None:
                outputs = torch.stack([output_map(draw) for draw in outputs])
            by_draws.append(as_double(outputs).var(0).cpu())
            seen += by_head[-1].shape[0]
            bar.advance(by_head[-1].shape[0])
            if seen >= samples:
                break
    if seen < 2:
        raise PosthocUQError("Calibration needs at least 2 inputs, and the loader yields fewer.")
    head_sd, drawn_sd = (torch.cat(parts).reshape(seen, -1).sqrt() for parts in (by_head, by_draws))
    return _fitted(head_sd, drawn_sd, n_mc, slope)


def _fitted(head_sd: Tensor, drawn_sd: Tensor, n_mc: int, slope: bool) -> Calibration:
    usable = (head_sd > 0) & (drawn_sd > 0)
    fitted, held_out = usable.clone(), usable.clone()
    fitted[1::2], held_out[0::2] = False, False
    if not fitted.any() or not held_out.any():
        raise PosthocUQError("No output varies under the posterior, so there is no scale to calibrate.")
    x, y = head_sd[fitted].log(), drawn_sd[fitted].log()
    beta = 1.0
    if slope and x.numel() > 1 and float(x.var()) > 0:
        centred = x - x.mean()
        beta = float((centred * (y - y.mean())).sum() / centred.square().sum())
    alpha = float((y - beta * x).median())
    corrected = exp(alpha) * head_sd[held_out] ** beta
    return Calibration(
        alpha,
        beta,
        float((corrected / drawn_sd[held_out] - 1).abs().mean()),
        float((head_sd[held_out] / drawn_sd[held_out] - 1).abs().mean()),
        n_mc,
    )
