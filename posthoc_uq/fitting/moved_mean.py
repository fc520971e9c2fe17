"""The mean of a regression's last layer, moved by the data of an update.

The layer's outputs ``W phi`` are linear in its weights, so that Bayes' rule makes another Gaussian of the posterior::

    S' = (S^-1 + sum_n w_n phi_n phi_n^T / s^2)^-1,    W' = W + S' sum_n w_n (y_n - W phi_n) phi_n^T / s^2,

and with minus signs for data that go out. Nothing of it is approximate; it is the fit on all data where W was that of
the data before, the maximum of their posterior.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import DeferredChecks, as_double, host_double, widest_dtype
from posthoc_uq.core.distributed import all_reduce_sum
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.curvature.features import feature_rows, watched_for
from posthoc_uq.layers.capture import Recording
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import Gaussian
from posthoc_uq.likelihoods.weights import weights_of
from posthoc_uq.methods.task import Task
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.settings import layer_matrix

_EXACT = ("full", "kfac")  # whose Fisher of one linear layer under a Gaussian likelihood is the Hessian
_ROWS = 512  # of the covariance that are computed at once


def check_exact(posterior: Posterior) -> None:
    """Refuse, as far as the posterior alone tells, one whose mean does not move exactly.

    Raises:
        PosthocUQError: names the reason.
    """
    fisher = posterior.history.fit.get("fisher")
    if posterior.likelihood.noise_variance is None:
        raise _not_exact(f"has likelihood={posterior.likelihood.name!r}")
    if posterior.method not in _EXACT or fisher != "exact":
        raise _not_exact(f"is by method={posterior.method!r} with fisher={fisher!r}")
    if len(posterior.layers) > 1:
        raise _not_exact(f"covers {len(posterior.layers)} layers")


def _not_exact(reason: str) -> PosthocUQError:
    return PosthocUQError(
        f"mean=True moves the mean where that is exact: of a regression's last linear layer alone, by method='full' or "
        f"uq.KFAC(keep_grams=True) with exact labels. This posterior {reason}; train the network on with the data, and "
        f"fit again."
    )


class MeanGradient:
    """Watches the sweep of an update and sums ``w_n (y_n - W phi_n) phi_n^T / s^2`` at the posterior's mean.

    Args:
        posterior: before the update.
        task: of the data that come in or go out.

    Attributes:
        total: the sum, ``(outputs, inputs)``, float64 on the host.

    Raises:
        PosthocUQError: the layer's outputs are not the model's.
    """

    def __init__(self, posterior: Posterior, task: Task) -> None:
        source, (layer,) = task.features, posterior.layers.values()
        if source is None or source.source != "outputs" or source.layer != layer or layer.groups != 1:
            raise _not_exact(
                f"covers '{layer.name}', which does not give the model's outputs, one row a sample"
            )
        self._posterior, self._layer = posterior, layer
        self._matrix = host_double(layer_matrix(layer, posterior.mean))[0]
        self.total = torch.zeros_like(self._matrix)
        task.prepared.capture.watched = watched_for(layer)
        task.observers.append(self)

    def see(self, batch: Batch, keys: Tensor, recording: Recording, checks: DeferredChecks) -> None:
        """Add a batch; see `Observer`."""
        likelihood, outputs = self._posterior.observation, recording.outputs.detach()
        if batch.targets is None:
            raise PosthocUQError("mean=True needs targets; pass a loader of (inputs, targets).")
        rows = as_double(feature_rows(recording.watched, self._layer, len(keys)))
        targets = likelihood.regression_targets(outputs, batch.targets)
        weights = weights_of(likelihood, outputs, batch)
        assert isinstance(likelihood, Gaussian) and targets is not None
        residuals = as_double(targets) - rows @ self._matrix.T.to(rows)
        if likelihood.missing == "ignore":
            if self._posterior.method != "full" and bool(targets.isnan().any()):
                raise _not_exact(f"is by method={self._posterior.method!r} with missing targets")
            residuals = likelihood.where_there(residuals, targets)
        residuals = likelihood.times_std(
            residuals / likelihood.noise_variance.to(rows), 2
        )  # in outputs' units
        if weights is not None:
            residuals = residuals * weights.samples.to(rows).unsqueeze(1)
        self.total += host_double(residuals.T @ rows)

    def moved(self, new: Posterior, remove: bool) -> Posterior:
        """The posterior after the update with the mean that belongs to it.

        Raises:
            NonFiniteError: the targets are not finite.
        """
        all_reduce_sum({"gradient": self.total}, "the sum for the mean")
        if not bool(torch.isfinite(self.total).all()):
            raise NonFiniteError(
                "The targets of these data are not finite, so that no mean follows from them."
            )
        before, layer = self._posterior, self._layer
        each = before.scale / before.evidence.total  # what a sample of the posterior counts
        gradient = (-each if remove else each) * self.total
        shift = torch.cat(list(_products(new, layer, gradient))).reshape(1, *gradient.shape)
        mean = layer.to_parameters(host_double(layer_matrix(layer, before.mean)) + shift)
        trained_mean = {name: value.to(new.mean[name]) for name, value in mean.items()}
        # of the data before it is not known at another mean
        evidence = replace(new.evidence, log_likelihood=None, squared_residuals=0.0, targets=0)
        return new.with_blocks(new.blocks, evidence=evidence, trained_mean=trained_mean)


def _products(posterior: Posterior, layer: Layer, gradient: Tensor) -> Iterator[Tensor]:
    """The covariance of the layer's weights times a gradient ``(outputs, inputs)``, in parts."""
    flat = gradient.reshape(1, -1)
    for part in torch.arange(flat.shape[1], device="cpu").split(_ROWS):
        units = torch.zeros(len(part), flat.shape[1], dtype=flat.dtype, device="cpu")
        units[torch.arange(len(part), device="cpu"), part] = 1.0
        rows = torch.cat([units, flat]).reshape(-1, 1, *gradient.shape)
        rows = rows.to(posterior.device, widest_dtype(posterior.device))
        yield host_double(posterior.quadratic({layer.name: rows}))[:-1, -1]
