"""`Posterior`: a distribution over the weights, a dict of blocks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import log
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core.devices import KEPT_BYTES, as_double, host_double
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import Count, check_option, shown
from posthoc_uq.core.randomness import mixed_seed
from posthoc_uq.layers.layer import Layer
from posthoc_uq.likelihoods import Likelihood
from posthoc_uq.posteriors import block as can
from posthoc_uq.posteriors.block import Block, Settings
from posthoc_uq.posteriors.covariance import Covariance
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.report import Report, build_report
from posthoc_uq.posteriors.settings import (
    ABOUT,
    Adjustable,
    Evidence,
    History,
    Hyperparameters,
    WeightPrior,
    layer_matrix,
)

# Where layers are in the blocks of a posterior: a block of one layer has its shape, one of several layers is
# a row.


class Layout:
    """Converts between the matrices of blocks and those of layers, all ``(groups, outputs, inputs)``.

    Args:
        layers: by name.
        members: block name to the names of its layers; a block of one layer has its name.
    """

    def __init__(self, layers: Mapping[str, Layer], members: Mapping[str, list[str]]) -> None:
        self._layers, self._members = layers, members

    def shape(self, block: str) -> tuple[int, int, int]:
        """The shape of a block's matrix."""
        if block in self._layers:
            return self._layers[block].matrix_shape
        return 1, 1, sum(self._layers[name].parameters for name in self._members[block])

    def home(self, layer: str) -> tuple[str, int]:
        """The block of a layer, and where the layer starts in it.

        Raises:
            PosthocUQError: there is no such layer.
        """
        if layer in self._layers and layer in self._members:
            return layer, 0
        for block, inner in self._members.items():
            if layer in inner:
                return block, sum(self._layers[name].parameters for name in inner[: inner.index(layer)])
        raise PosthocUQError(f"The posterior has no layer '{layer}'; it has {list(self._layers)[:8]}.")

    def prior(self, block: str, prior: Any, weight_prior: WeightPrior) -> Any:
        """The prior precision of a block's weights, from one number for all layers or one by layer, and from factors of
        single weights.
        """
        inner = self._members[block]
        precision = prior
        if isinstance(prior, Mapping):
            by_layer = cast(Mapping[str, Any], prior)
            parts = [host_double(by_layer[name]).expand(self._layers[name].parameters) for name in inner]
            precision = by_layer[inner[0]] if len(inner) == 1 else torch.cat(parts).reshape(1, 1, -1)
        if not weight_prior.precision:
            return precision
        own = as_double(self._matrix(block, weight_prior.precision))
        return own * (precision.to(own) if isinstance(precision, Tensor) else precision)

    def _matrix(self, block: str, parameters: Mapping[str, Tensor]) -> Tensor:
        """Parameters by name as a block's matrix ``(G, m, n)``."""
        parts = [layer_matrix(self._layers[name], parameters) for name in self._members[block]]
        return (
            parts[0] if block in self._layers else torch.cat([p.flatten() for p in parts]).reshape(1, 1, -1)
        )

    def means(self, blocks: Mapping[str, Block], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What blocks know themselves that their weights are on average, by parameter name.

        Args:
            blocks: by name; as a rule they know nothing of it.
            like: parameters of the same number format and device.
        """
        means: dict[str, Tensor] = {}
        for name, block in blocks.items():
            mean = block.stored_mean()
            for layer, matrix in [] if mean is None else self.split(name, mean):
                for parameter, tensor in layer.to_parameters(matrix).items():
                    means[parameter] = tensor.to(like[parameter])
        return means

    def prior_terms(
        self,
        block: str,
        uncertain: Tensor | None,
        mean: Mapping[str, Tensor],
        weight_prior: WeightPrior,
        prior: Any,
    ) -> Any:
        """``sum tau r_i (theta_i - mu_i)^2 - sum log(tau r_i)`` over the uncertain weights of a block.

        Args:
            block: its name.
            uncertain: which weights are, ``(G, m, n)``; None for all.
            mean: theta, parameters by name.
            weight_prior: r and mu.
            prior: tau, one number or one by layer, differentiable where it is a tensor.
        """
        layers = [self._layers[name] for name in self._members[block]]
        chosen = (
            [None] * len(layers) if uncertain is None else [mask for _, mask in self.split(block, uncertain)]
        )
        total: Any = 0.0
        for layer, mask in zip(layers, chosen, strict=True):
            count, logs, squares = weight_prior.occam(layer, mean, mask)
            tau = cast(Any, prior[layer.name] if isinstance(prior, Mapping) else prior)
            logarithm = tau.log() if isinstance(tau, Tensor) else log(tau)
            total = total - count * logarithm - logs + tau * squares
        return total

    def split(self, block: str, matrix: Tensor) -> Iterator[tuple[Layer, Tensor]]:
        """A block's matrix ``(*lead, G, m, n)`` as its layers' matrices."""
        if block in self._layers:
            yield self._layers[block], matrix
            return
        start = 0
        for name in self._members[block]:
            layer = self._layers[name]
            part = matrix[..., 0, 0, start : start + layer.parameters]
            start += layer.parameters
            yield layer, part.reshape(*matrix.shape[:-3], *layer.matrix_shape)

    def join(self, block: str, matrices: Mapping[str, Tensor]) -> Tensor:
        """Layers' matrices ``(q, G, m, n)`` as the block's; absent layers are zero."""
        if block in self._layers:
            return matrices[block]
        like = next(iter(matrices.values()))
        parts = [
            matrices[name].flatten(1)
            if name in matrices
            else like.new_zeros(like.shape[0], self._layers[name].parameters)
            for name in self._members[block]
        ]
        return torch.cat(parts, dim=1).reshape(like.shape[0], 1, 1, -1)


# What was computed from blocks at certain settings, and is kept for the next use.

Value = TypeVar("Value")

COVARIANCE_BYTES = 16 * 2**20  # the most that all kept covariances of a posterior take


class Cache(Generic[Value]):
    """The last value of each name, while memory allows; safe for several threads. A copy of it begins empty.

    Args:
        most: bytes that all values may take.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[str, tuple[Any, Value, int]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), (self._most,)

    def get(self, name: str, key: Any) -> Value | None:
        """The value of the name, if the last one was made for this key."""
        with self._lock:
            entry = self._entries.get(name)
        return entry[1] if entry is not None and entry[0] == key else None

    def put(self, name: str, key: Any, value: Value, size: int) -> None:
        """Keep a value of so many bytes in place of the name's last one, where there is room."""
        with self._lock:
            self._entries.pop(name, None)
            if size + sum(other for _, _, other in self._entries.values()) <= self._most:
                self._entries[name] = key, value, size


# The posterior over a model's weights: one block for each layer, or one for several.

_Number = float | Tensor
_TUNE = "tune on held-out data: uq.tune(posterior, val_loader)"


class Posterior(Adjustable):
    """A distribution over the weights of some layers, independent between blocks; as a rule ``N(mean, P^-1)``.

    ``P = scale / noise_scale * I + prior_precision`` per block (the square of `noise_scale` for the empirical
    Fisher), with the Fisher information ``I`` in the form of the method. Hyperparameters are plain attributes, and
    `tunable` names those that may be set. Setting one never needs the data again.
    Every computation uses the settings of one moment, whatever other threads set meanwhile; see `snapshot`.

    A method that optimises the variances themselves has its prior and its noise in what it optimises. There
    `prior_precision` says which prior that was and cannot be set, and only `scale`, where there is one, enters the
    variances, as ``samples / scale``. Blocks that are not Gaussian can at least draw.

    Attributes:
        method: the name of the method that fitted it.
        layers: the layers by name.
        blocks: block name to `Block`; a block has the name of its layer, except in the dense posterior.
        members: block name to the names of its layers.
        layout: where the layers are in the blocks.
        original: the model's own parameters by name, a view of them: of the layers, and those of `trained_mean`.
        trained_mean: trained parameters by name, which replace the model's own; some may be of no layer, and certain.
        mean: the parameters that the Gaussian is centred on: those of `trained_mean`, and else of `original`.
        likelihood: of the targets given the outputs, as in the fit; `observation` is at the present noise scale.
        model: the model it was fitted on or loaded for; no part of the state.
        features: statistics of the last layer's inputs in training, for novelty; None where the fit took none.
        weight_prior: the prior of single weights, a factor on `prior_precision` and a mean; as given to the fit.
        capabilities: what all of its blocks can do, by the names in `posthoc_uq.posteriors.block`.
        fingerprint: digest of `original` at the fit; that is the model's own memory, which later training changes.
        buffers_fingerprint: digest of the model's buffers at the fit (`model.statistics_of`); None where
            it has none.
        warned_heads: heads for which `wrap` has said that the posterior was tuned for another; no part of the state.
    """

    def __init__(
        self,
        method: str,
        layers: Mapping[str, Layer],
        blocks: Mapping[str, Block],
        members: Mapping[str, list[str]],
        mean: Mapping[str, Tensor],
        likelihood: Likelihood,
        evidence: Evidence,
        history: History | None = None,
        *,
        trained_mean: Mapping[str, Tensor] | None = None,
        settings: Hyperparameters | None = None,
    ) -> None:
        self.method = method
        self.layers = dict(layers)
        self.blocks = dict(blocks)
        self.members = {name: list(inner) for name, inner in members.items()}
        self.original = {name: mean[name] for layer in self.layers.values() for name in layer.parameter_names}
        self.original |= {name: mean[name] for name in trained_mean or {}}
        self.layout = Layout(self.layers, self.members)
        self.trained_mean = dict(trained_mean or {}) | self.layout.means(self.blocks, self.original)
        self.mean = {
            name: self.trained_mean.get(name, parameter) for name, parameter in self.original.items()
        }
        self.likelihood = likelihood
        self.evidence = evidence
        self.history = history or History()
        self.model: nn.Module | None = None
        self.features: FeatureGrams | None = None
        self.weight_prior = WeightPrior()
        self.fingerprint: str | None = None
        self.buffers_fingerprint: str | None = None
        by_block = [type(block).capabilities() for block in self.blocks.values()]
        self.capabilities = by_block[0].intersection(*by_block) if by_block else frozenset[str]()
        outputs = {"noise_scale"} if likelihood.has_noise else set[str]()
        outputs |= {"temperature"} if likelihood.logits else set()
        self.tunable = frozenset(outputs).union(*(block.tunable for block in self.blocks.values()))
        self.settled = frozenset[str]().union(*(block.settled for block in self.blocks.values()))
        self.warned_heads: set[str] = set()
        self._begin(settings or Hyperparameters(evidence.total))
        self._cache = Cache[Covariance](COVARIANCE_BYTES)
        self._variances = Cache[Tensor](KEPT_BYTES)
        self._of_layers = Cache[Covariance](KEPT_BYTES)

    def require(self, needs: Collection[str], what: str, way_out: str = "") -> None:
        """Refuse what the blocks cannot do; see `posthoc_uq.posteriors.block.required`."""
        can.required(needs, self.capabilities, self.method, what, way_out)

    def __repr__(self) -> str:
        count = sum(layer.parameters for layer in self.layers.values())
        return (
            f"Posterior(method={self.method!r}, layers={len(self.layers)}, parameters={count}, "
            f"scale={self.scale:g}, prior_precision={self.prior_precision})"
        )

    def with_blocks(
        self,
        blocks: Mapping[str, Block],
        *,
        evidence: Evidence | None = None,
        history: History | None = None,
        settings: Hyperparameters | None = None,
    ) -> Posterior:
        """A posterior of the same layers, weights and prior with other blocks; what is not given is that of this one,
        but for statistics of the data (`features`), which belong to its blocks.
        """
        new = Posterior(
            self.method,
            self.layers,
            blocks,
            self.members,
            self.original,
            self.likelihood,
            evidence or self.evidence,
            history or copy.deepcopy(self.history),
            trained_mean=self.trained_mean,
            settings=settings or self.settings,
        )
        new.model, new.weight_prior = self.model, self.weight_prior
        new.fingerprint, new.buffers_fingerprint = self.fingerprint, self.buffers_fingerprint
        return new

    def snapshot(self, settings: Hyperparameters | None = None) -> Posterior:
        """A copy of this posterior that keeps the present settings whatever is set later; tensors are shared.

        Args:
            settings: other settings, in place of the present ones.
        """
        frozen = copy.copy(self)
        frozen._searching = True  # no warnings: nobody chose its settings
        if settings is not None:
            frozen.settings = settings
        return frozen

    def block_shape(self, block: str) -> tuple[int, int, int]:
        """``(groups, outputs, inputs)`` of a block; of several layers ``(1, 1, weights)``."""
        return self.layout.shape(block)

    @property
    def device(self) -> torch.device:
        """Where the blocks live."""
        return next(iter(next(iter(self.blocks.values())).tensors().values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the blocks."""
        return next(iter(next(iter(self.blocks.values())).tensors().values())).dtype

    @property
    def noise_variance(self) -> Tensor | None:
        """Noise variance of each output, ``(outputs,)`` float64, or None where the likelihood has none."""
        return self.observation.noise_variance

    @property
    def observation(self) -> Likelihood:
        """The likelihood of the targets at the present noise scale; `likelihood` is that of the fit."""
        return self.likelihood.at_noise_scale(self.noise_scale)

    def sample(self, n: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw `n` sets of weights.

        The i-th draw depends on the generator alone, not on `n`, the device or other draws; without a
        generator the draws differ from call to call. The global random state is never touched.

        That holds for one fit. A fit with other rounding (on another device, with the data in another order) has the
        same distribution up to rounding, but with ``"kfac"`` and ``"efb"`` one seed then gives other draws: draws are
        made along eigenvectors, and those of close eigenvalues are defined only up to a rotation.

        Returns:
            Parameter name to ``(n, *shape)``, in the parameters' dtype and on their device.

        Raises:
            PosthocUQError: `n` is not positive.
        """
        return self.sample_from(self.draw_seeds(n, generator))

    def draw_seeds(self, n: int, generator: torch.Generator | None = None) -> list[int]:
        """The seeds of the `n` draws that `sample` would make with this generator, for `sample_from`.

        Raises:
            PosthocUQError: `n` is not positive.
        """
        n = check_option("The number of draws", n, Count)
        if generator is None:
            generator = torch.Generator()
            generator.seed()
        if not isinstance(cast(Any, generator), torch.Generator):
            raise PosthocUQError(f"generator must be a torch.Generator, not {shown(generator)}.")
        return torch.randint(0, 2**63 - 1, (n,), generator=generator, device=generator.device).tolist()

    def sample_from(
        self,
        seeds: Sequence[int],
        *,
        signs: Sequence[int] | None = None,
        covariances: Mapping[str, Covariance] | None = None,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """The draws of these seeds; each is the same, bit for bit, whatever other draws are made with it.

        Args:
            seeds: one per draw. A repeated seed gives the same deviation from the mean and is drawn only once.
            signs: 1 or -1 per draw, by which its deviation is multiplied: ``mean - deviation`` is as likely
                as ``mean + deviation``, and such a pair is antithetic (Hammersley, Morton 1956). None for 1.
            covariances: from `covariances`, for draws at the settings of that moment; the present ones if None.
            dtype: of the draws; the parameters' own if None.

        Returns:
            Parameter name to ``(draws, *shape)``, on the parameters' device.
        """
        if signs is not None:
            self.require([can.SYMMETRY], "A draw with a sign")
        unique = list(dict.fromkeys(seeds))
        places = {seed: place for place, seed in enumerate(unique)}
        index = torch.tensor([places[seed] for seed in seeds], device="cpu")
        draws: dict[str, Tensor] = {}
        frozen = self.snapshot()
        for layer, matrix, centred in frozen._drawn(unique, covariances):
            for name, values in layer.to_parameters(matrix).items():
                mean = frozen.mean[name]
                # A bias is a column of its layer's matrix: a view of it would keep the whole matrix in memory.
                draw = values.to(device=mean.device, dtype=mean.dtype).contiguous()
                if signs is not None:
                    sign = torch.tensor(signs, device="cpu").to(draw).reshape(-1, *[1] * mean.ndim)
                    draw = draw[index.to(draw.device)] * sign
                elif len(unique) < len(seeds):
                    draw = draw[index.to(draw.device)]
                draw = draw.add_(mean) if centred else draw
                draws[name] = draw.to(dtype=mean.dtype if dtype is None else dtype)
        return draws

    def covariances(self) -> dict[str, Covariance]:
        """Every block's covariance at the present settings, ready for use, by block name.

        For repeated draws: it takes the memory of about one more set of weights (for INF also the systems of its
        directions), and saves factorising at every draw the blocks that are too large for the posterior's own cache.
        """
        return dict(self.snapshot()._each_covariance())

    def _drawn(
        self, seeds: Sequence[int], covariances: Mapping[str, Covariance] | None = None
    ) -> Iterator[tuple[Layer, Tensor, bool]]:
        """Draws layer by layer, ``(n, G, m, n)``, and whether they are deviations from the mean."""
        settings = self._settings
        for index, (name, block) in enumerate(self.blocks.items()):
            covariance = self._covariance(name, settings) if covariances is None else covariances[name]
            shape, like = self.layout.shape(name), next(iter(block.tensors().values()))
            out = like.new_empty(len(seeds), *shape)
            # One at a time, which is as fast: a triangular solve rounds several columns differently from one.
            for row, seed in zip(out, seeds, strict=True):
                row.copy_(covariance.draw(torch.Generator().manual_seed(mixed_seed(seed, index)), row))
            for layer, matrix in self.layout.split(name, out):
                yield layer, matrix, covariance.centred

    def variance(self) -> dict[str, Tensor]:
        """Marginal variance of every parameter, by name and in its shape.

        Raises:
            PosthocUQError: the blocks know none.
        """
        self.require([can.VARIANCES], "posterior.variance()")
        variances: dict[str, Tensor] = {}
        frozen = self.snapshot()
        settings = frozen.settings
        for name in frozen.blocks:
            key = frozen._key(name, settings)
            matrices = frozen._variances.get(name, key)
            if matrices is None:
                of_layer = frozen._of_layers.get(name, key) if name in frozen.layers else None
                matrices = (of_layer or frozen._covariance(name, settings)).variance()
                frozen._variances.put(name, key, matrices, matrices.nbytes)
            for layer, matrix in frozen.layout.split(name, matrices.clone()):
                variances |= layer.to_parameters(matrix)
        return variances

    def quadratic(self, jacobians: Mapping[str, Tensor]) -> Tensor:
        """``J Sigma J^T``, ``(q, q)``: the covariance of q linear functions of the weights.

        Args:
            jacobians: layer name to ``(q, groups, outputs, inputs)`` (the matrix view, bias last); absent
                layers count as zero.

        Raises:
            PosthocUQError: no layer is given, or one is unknown; or the blocks know no such forms.
        """
        self.require([can.QUADRATIC], "posterior.quadratic()")
        unknown = sorted(set(jacobians) - set(self.layers))
        if unknown or not jacobians:
            raise PosthocUQError(f"Jacobians must be given for layers of the posterior; unknown: {unknown}.")
        total, frozen = None, self.snapshot()
        for name, inner in frozen.members.items():
            if not any(layer in jacobians for layer in inner):
                continue
            part = frozen.covariance(name).quadratic(frozen.layout.join(name, jacobians))
            total = part if total is None else total + part
        assert total is not None
        return total

    def of_layer(self, layer: str) -> Covariance:
        """The covariance of one layer's weights, for its own outputs; kept for the next use while memory allows.

        Raises:
            PosthocUQError: the posterior has no such layer, or its blocks know no such covariance.
        """
        self.require([can.ROWS], "The covariance of one layer's rows")
        block, start = self.layout.home(layer)
        frozen = self.snapshot()
        settings = frozen.settings
        key = frozen._key(block, settings)
        found = frozen._of_layers.get(layer, key)
        if found is None:
            shape, whole = frozen.layers[layer].matrix_shape, frozen.layout.shape(block)
            found = frozen._covariance(block, settings).of_layer(start, shape, whole)
            frozen._of_layers.put(layer, key, found, found.bytes())
        return found

    def log_determinant(self) -> Tensor:
        """``log det P`` over all blocks, a scalar.

        Raises:
            PosthocUQError: the blocks know none.
        """
        self.require([can.LOG_DETERMINANT], "posterior.log_determinant()")
        return torch.stack(
            [covariance.log_determinant() for _, covariance in self.snapshot()._each_covariance()]
        ).sum()

    def log_marginal_likelihood(
        self,
        prior_precision: float | Tensor | Mapping[str, float | Tensor] | None = None,
        noise_scale: float | Tensor | None = None,
    ) -> Tensor:
        """Laplace's approximation to ``log p(data)`` (MacKay 1992), a scalar in nats:
        ``log p(D | theta) - (log det P - sum n log tau + sum tau |theta|^2) / 2``; with a prior of single weights
        ``sum log(tau r_i)`` and ``sum tau r_i (theta_i - mu_i)^2`` (`WeightPrior`).

        Args:
            prior_precision: tau to evaluate at, differentiably where it is a tensor (a scalar, or by layer
                name); the posterior's own if None.
            noise_scale: factor on the noise variance, likewise.

        Raises:
            PosthocUQError: the fit saw no labels, or the variances are no Laplace approximation's.
        """
        frozen = self.snapshot()
        noise_factor = frozen.noise_scale if noise_scale is None else noise_scale
        parts = [frozen.occam_factor(name, prior_precision, noise_scale) for name in frozen.blocks]
        return frozen.evidence.at_noise(noise_factor) - 0.5 * torch.stack(parts).sum()

    def occam_factor(
        self,
        block: str,
        prior_precision: float | Tensor | Mapping[str, float | Tensor] | None = None,
        noise_scale: float | Tensor | None = None,
    ) -> Tensor:
        """One block's ``log det P - sum n log tau + sum tau |theta|^2``, a scalar."""
        tuned = _TUNE if self.width_parameter is not None or self.likelihood.logits else ""
        self.require([can.LOG_DETERMINANT], "The log marginal likelihood", tuned)
        if "prior_precision" not in self.blocks[block].tunable:
            raise PosthocUQError(
                f"method={self.method!r} has no log marginal likelihood: it found its posterior for one given prior "
                f"(see report()). Fit again with another prior_precision{tuned and f', or {tuned}'}."
            )
        settings = self._settings
        prior = settings.prior_precision if prior_precision is None else prior_precision
        noise_factor = settings.noise_scale if noise_scale is None else noise_scale
        if prior_precision is None and noise_scale is None:
            covariance = self._covariance(block, settings)
        else:
            covariance = self.blocks[block].covariance(self._of_block(block, settings, prior, noise_factor))
        own = self.blocks[block].uncertain()
        return covariance.log_determinant() + self.layout.prior_terms(
            block, own, self.mean, self.weight_prior, prior
        )

    def covariance(self, block: str) -> Covariance:
        """A block's covariance at the present settings, ready for use; kept while memory allows."""
        return self._covariance(block, self._settings)

    def _each_covariance(self) -> Iterator[tuple[str, Covariance]]:
        """Every block's name and covariance, one after the other, at the settings of one moment."""
        settings = self._settings
        for name in self.blocks:
            yield name, self._covariance(name, settings)

    def _covariance(self, block: str, settings: Hyperparameters) -> Covariance:
        key = self._key(block, settings)
        covariance = self._cache.get(block, key)
        if covariance is None:
            block_settings = self._of_block(block, settings, settings.prior_precision, settings.noise_scale)
            covariance = self.blocks[block].covariance(block_settings)
            self._cache.put(block, key, covariance, covariance.bytes())
        return covariance

    def _key(self, block: str, settings: Hyperparameters) -> tuple[Any, ...]:
        """All on which a block's precision depends; the prior of single weights as an object, which the key keeps
        alive."""
        priors = tuple(settings.layer_prior(name) for name in self.members[block])
        return settings.scale, settings.noise_scale, settings.residual_weight, priors, self.weight_prior

    def _of_block(self, block: str, settings: Hyperparameters, prior: Any, noise_scale: _Number) -> Settings:
        """The settings on which a block's precision depends, at this prior precision and noise scale."""
        # of other likelihoods the noise scale is a factor on the dispersion of predictions alone
        power = 0 if self.likelihood.noise_variance is None else self.evidence.noise_power
        scale = settings.scale / noise_scale**power
        precision = self.layout.prior(block, prior, self.weight_prior)
        return Settings(scale, precision, settings.residual_weight)

    def reported(self) -> dict[str, Any]:
        """Of a likelihood without a noise variance of its own, the noise scale too."""
        own = self.likelihood.has_noise and self.likelihood.noise_variance is None
        return super().reported() | ({ABOUT["noise_scale"].label: self.noise_scale} if own else {})

    def report(self) -> Report:
        """What was fitted and how, with a table of the layers; prints itself. See `Report` for its lines."""
        frozen = self.snapshot()
        return build_report(
            frozen.method,
            frozen.likelihood.name,
            frozen.layers,
            frozen.blocks,
            frozen.history,
            settings=frozen._settings,
            shown=frozen.reported(),
            features=frozen.features,
            noise_variance=frozen.noise_variance,
        )
