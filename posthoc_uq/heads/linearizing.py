"""What the linearised head prepares and keeps: copies of the network, tracked layers, weights' covariance and draws."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from posthoc_uq.curvature.dryrun import count_samples
from posthoc_uq.curvature.operands import temporary_limit
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.chosen_outputs import ChosenOutputs
from posthoc_uq.heads.chosen_positions import picked_positions
from posthoc_uq.heads.fixed_part import FixedPart
from posthoc_uq.heads.jacobians import WeightCovariance
from posthoc_uq.heads.linearization import Engine, Linearization
from posthoc_uq.heads.position_linearization import (
    MOST_BACKWARD,
    PositionLinearization,
    PositionProbes,
)
from posthoc_uq.heads.predictor import Predictor, recentred, same_centre
from posthoc_uq.heads.probes import Probes, drawn_outputs
from posthoc_uq.heads.replay import FeatureBatch
from posthoc_uq.heads.tracking import TrackedModel, track_layers
from posthoc_uq.layers import Call
from posthoc_uq.loaders import Batch
from posthoc_uq.memory import default_budget
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.settings import Hyperparameters
from posthoc_uq.predictions.layout import Layout
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import check_differentiable, model_device, replicate, statistics_dtype, unwrap

Self = TypeVar("Self", bound="Linearizing")

_PREPARING = threading.RLock()


@dataclass(eq=False)
class _Networks:
    """Copies of the network at one mean.

    Attributes:
        centre: the posterior's that they have.
        twin: the copy.
        swapped: one whose weights are swapped while it runs; None before it is needed.
        fixed_part: the part of the network before the weights with a posterior.
        ready: the copy whose layers are tracked, once the first batch is there.
    """

    centre: Mapping[str, Tensor]
    twin: nn.Module
    swapped: nn.Module | None
    fixed_part: FixedPart
    ready: TrackedModel | None = None

    @classmethod
    def of(cls, twin: nn.Module, posterior: Posterior) -> _Networks:
        """What there is at the beginning."""
        return cls(posterior.centre, twin, None, FixedPart(twin, posterior.mean))


class Linearizing(Predictor):
    """A predictor that linearises a network in its weights, batch by batch.

    Attributes:
        _engine: see `LinearizedPredictor`, and so the others.
        _n_probes: draws of the weights that the engine ``"jvp"`` keeps.
        _tells_novelty: whether the inputs of the last layer are watched.
        _positions: of outputs with positions, those that are used; None for all.
        _budget: bytes of a temporary; None for a share of what is free.
        _chosen: which outputs are used.
    """

    _engine: Any
    _n_probes: int
    _tells_novelty: bool
    _positions: Tensor | None
    _budget: int | None
    _chosen: ChosenOutputs

    def _copy_network(self, model: nn.Module) -> None:
        """Copy the network, once its options are set; nothing is prepared yet."""
        check_differentiable(unwrap(model))
        self._dtype = statistics_dtype(unwrap(model), None)
        with isolated_random_state():  # copying a module may run its code
            twin = replicate(self._model[0], self._posterior.centre)
        self._networks = _Networks.of(twin, self._posterior)
        self._weights: tuple[tuple[Hyperparameters, int], WeightCovariance] | None = None
        self._drawn: tuple[tuple[Hyperparameters, int], dict[str, Tensor]] | None = None

    def _networks_of(self, posterior: Posterior) -> _Networks:
        """The copies of the network at a posterior's mean. An update may move it; predictions that are under way keep
        the old copies.
        """
        networks = self._networks
        if not same_centre(networks.centre, posterior.centre):
            with _PREPARING:
                networks = self._networks
                if not same_centre(networks.centre, posterior.centre):
                    self._networks = networks = _Networks.of(
                        recentred(networks.twin, posterior.centre), posterior
                    )
        return networks

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        """Move, or change the precision of, the network; all preparations are made anew."""
        super()._apply(fn, recurse)
        networks = self._networks
        networks.twin._apply(fn)
        if networks.swapped is not None:
            networks.swapped._apply(fn)
        self._dtype = statistics_dtype(networks.twin, None)
        networks.fixed_part, networks.ready = FixedPart(networks.twin, self._posterior.mean), None
        self._weights = self._drawn = None
        return self

    @property
    def device(self) -> torch.device:
        """Where it predicts."""
        return model_device(self._networks.twin)

    def _linearized(
        self, posterior: Posterior, batch: Batch
    ) -> Linearization | Probes | PositionLinearization | PositionProbes:
        """The linearisation of one batch under a posterior's settings."""
        samples = batch.features.samples if isinstance(batch, FeatureBatch) else count_samples(batch)
        networks = self._networks_of(posterior)
        if self._engine == "jvp":
            return self._probed(networks, posterior, batch, samples)
        engine = Engine(
            self._engine,
            self._prepared(networks, batch),
            tuple(posterior.layers),
            lambda device: self._covariances(posterior, device),
            self._chosen,
            self._dtype,
            self._budget,
        )
        recording = engine.tracked.capture.run(batch, samples)
        layout = self._layout(recording.outputs)
        if layout is None:
            return Linearization(engine, batch, samples, recording)
        picked = picked_positions(self._positions, layout.positions(recording.outputs))
        linearization = PositionLinearization(engine, recording, layout, picked)
        if self._engine == "auto" and linearization.backward_passes > MOST_BACKWARD:
            return self._probed(networks, posterior, batch, samples, recording.watched)
        return linearization

    def _layout(self, outputs: Tensor) -> Layout | None:
        """The layout of outputs with positions, or None.

        Raises:
            PosthocUQError: positions were asked for, and there are none.
        """
        layout = self._posterior.likelihood.positions_of(outputs)
        if layout is None and self._positions is not None:
            raise PosthocUQError(
                f"positions= picks positions of outputs that have some, such as pixels or tokens, and these outputs "
                f"are of shape {tuple(outputs.shape)}; leave it out."
            )
        return layout

    def _probed(
        self,
        networks: _Networks,
        posterior: Posterior,
        batch: Batch,
        samples: int,
        watched: Sequence[Call] = (),
    ) -> Probes | PositionProbes:
        """The linearisation by draws of the function."""
        outputs, deviations = self._draw(networks, batch, samples, self._deviations(posterior))
        layout = self._layout(outputs)
        if layout is None:
            return Probes(outputs, deviations, self._chosen)
        picked = picked_positions(self._positions, layout.positions(outputs))
        probes = PositionProbes(self._dtype, outputs, deviations, layout, picked)
        probes.watched = list(watched)
        return probes

    def _draw(
        self, networks: _Networks, batch: Batch, samples: int, deviations: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Outputs, and draws of their deviations; see `drawn_outputs`."""
        if networks.swapped is None:
            with _PREPARING, isolated_random_state():
                if networks.swapped is None:
                    networks.swapped = replicate(networks.twin)
        return drawn_outputs(networks.swapped, networks.fixed_part, batch, samples, deviations, self._dtype)

    def _covariances(self, posterior: Posterior, device: torch.device) -> WeightCovariance:
        """The covariance of the weights, cached until settings or data change."""
        settings, cached = posterior.moment, self._weights
        if cached is None or cached[0] != settings:
            with _PREPARING:
                cached = self._weights
                if cached is None or cached[0] != settings:
                    budget = default_budget(device) if self._budget is None else self._budget
                    limit = temporary_limit(budget, device)
                    covariance = WeightCovariance(posterior, self._dtype, device, limit)
                    self._weights = cached = (settings, covariance)
        return cached[1]

    def _deviations(self, posterior: Posterior) -> dict[str, Tensor]:
        """Draws of the weights' deviation from the trained ones, by parameter, kept until settings or data change."""
        settings, cached = posterior.moment, self._drawn
        if cached is None or cached[0] != settings:
            with _PREPARING:
                cached = self._drawn
                if cached is None or cached[0] != settings:
                    draws = posterior.sample(self._n_probes, torch.Generator().manual_seed(0))
                    device = model_device(self._networks.twin)
                    deviations = {
                        name: (drawn - posterior.mean[name]).to(device) for name, drawn in draws.items()
                    }
                    self._drawn = cached = (settings, deviations)
        return cached[1]

    def _prepared(self, networks: _Networks, batch: Batch) -> TrackedModel:
        if networks.ready is None:
            with _PREPARING, isolated_random_state():
                if networks.ready is None:
                    ready = track_layers(networks.twin, self._posterior, batch.copied(), self._dtype)
                    if self._tells_novelty and self._posterior.features is not None:
                        ready.capture.watched = self._posterior.features.layer
                    networks.ready = ready
        return networks.ready


@contextmanager
def without_gradients() -> Generator[None]:
    """No inference mode and no gradients, whatever the caller's mode: autograd is used inside."""
    with torch.inference_mode(False), torch.no_grad():
        yield
