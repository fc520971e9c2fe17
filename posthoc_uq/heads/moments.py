"""The moments head: means and variances carried through the network in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from math import exp
from typing import Any, Literal, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from posthoc_uq.core.batches import (
    Bar,
    Batch,
    BatchFunction,
    BatchReader,
    batches,
    check_loader,
    count_samples,
)
from posthoc_uq.core.devices import TEMPORARY_BYTES, as_double, at_least_float32
from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.model import replicate
from posthoc_uq.core.options import Count, Kappa, Unit, check_option
from posthoc_uq.core.progress import bars_shown
from posthoc_uq.core.randomness import isolated_random_state
from posthoc_uq.core.records import fault_of
from posthoc_uq.core.steady import steady
from posthoc_uq.heads.predictor import GaussianPredictor, check_finite, reading
from posthoc_uq.heads.sampling import SamplingPredictor
from posthoc_uq.layers.frozen import Features, FrozenPart
from posthoc_uq.layers.layer import Layer
from posthoc_uq.layers.operands import temporary_limit
from posthoc_uq.likelihoods.draws import LINK_DRAWS, OutputGaussian, symmetric_root
from posthoc_uq.likelihoods.prediction import Prediction
from posthoc_uq.likelihoods.weights import counted_positions
from posthoc_uq.moments.propagation import products_of, propagate, running_module
from posthoc_uq.moments.tensor import Covariances, MaxPool, Relu, Rules, Unknown
from posthoc_uq.moments.unscented import KAPPA
from posthoc_uq.posteriors import HYPERPARAMETERS, ROWS, VARIANCES, Covariance, Posterior, ScaleCorrection
from posthoc_uq.posteriors.settings import SettingsRecord

# The posterior of each layer as the rules of the moments head need it: marginal variances in the weight's
# shape, and the covariance of each row of weights where it is used.


class LayerPosterior(nn.Module):
    """The posterior of one layer's weights; a module, so that it moves with its predictor.

    Attributes:
        variances: in the weight's shape, outputs first.
        bias_variances: of the bias, or None.
        summed: see `moments.tensor.WeightPosterior`.
        rows: the covariance of rows, or None.
        row: whether `rows` gives the variance.

    With `across`, the covariance across outputs is to be had too.
    """

    variances: Tensor
    bias_variances: Tensor | None
    summed: Tensor

    def __init__(
        self,
        layer: Layer,
        weight: Tensor,
        variances: Mapping[str, Tensor],
        covariance: Covariance | None,
        row: bool,
        across: bool,
    ) -> None:
        super().__init__()
        self.layer = layer.name
        self.row = row
        self._given, self._across, self._shape = covariance, across, layer.matrix_shape
        self.rows = self._prepared(weight)
        self._has_bias = layer.bias is not None
        marginals, summed = products_of(layer, weight.detach(), variances[layer.weight])
        bias = variances[layer.bias].to(marginals) if layer.bias is not None else None
        for name, tensor in (
            ("variances", marginals),
            ("bias_variances", bias),
            ("summed", summed),
        ):
            self.register_buffer(name, tensor, persistent=False)

    def _prepared(self, like: Tensor) -> Covariance | None:
        if self._given is None:
            return None
        limit = temporary_limit(TEMPORARY_BYTES, like.device)
        # what it needs is made here: later there may be a tracer, or a caller's inference mode
        with torch.inference_mode(False), torch.no_grad():
            ready = self._given.prepared(like.dtype, like.device, limit)
            zeros = torch.zeros(1, self._shape[0], self._shape[2], dtype=like.dtype, device=like.device)
            ready.output_variance(zeros, zeros)
            if self._across:
                ready.output_covariance(zeros[:, 0], torch.diag_embed(zeros[:, 0]))
        return ready

    def _apply(self, fn: Any, recurse: bool = True) -> LayerPosterior:
        super()._apply(fn, recurse)
        self.rows = self._prepared(self.variances)
        return self

    def _padded(self, mean: Tensor) -> Tensor:
        return torch.nn.functional.pad(mean, (0, 1), value=1.0) if self._has_bias else mean

    def row_variance(self, mean: Tensor, variance: Tensor | None) -> Tensor:
        """Variance by the weights alone, ``(rows, outputs)``; see `Covariance.output_variance`."""
        assert self.rows is not None
        input_variance = variance
        if variance is not None and self._has_bias:
            input_variance = torch.nn.functional.pad(variance, (0, 1))
        row_variance = self.rows.output_variance(
            self._padded(mean).unsqueeze(1), None if input_variance is None else input_variance.unsqueeze(1)
        )
        return row_variance.squeeze(1)

    def covariance(self, mean: Tensor, covariance: Tensor | None) -> Tensor:
        """Covariance by the weights alone, ``(rows, outputs, outputs)``; see `Covariance.output_covariance`."""
        assert self.rows is not None
        if covariance is not None and self._has_bias:
            covariance = torch.nn.functional.pad(covariance, (0, 1, 0, 1))
        return self.rows.output_covariance(self._padded(mean), covariance).to(mean)


def layer_posteriors(model: nn.Module, posterior: Posterior, weights: str, cov: str) -> list[LayerPosterior]:
    """The `LayerPosterior` of every layer.

    Args:
        model: at the posterior's mean.
        posterior: gives covariances and variances.
        weights: ``"row"`` keeps the covariance inside a row of linear layers, ``"marginal"`` no covariance at all,
            ``"auto"`` as `"row"` where the posterior knows it; linear layers use it for inputs ``(samples, inputs)``
            and marginal variances for inputs of several positions, where a row's covariance costs a product for each of
            its directions.
        cov: ``"full"`` needs the covariance across outputs, whatever `weights` says.
    """
    rows_wanted = ROWS in posterior.capabilities if weights == "auto" else weights == "row"
    if cov == "full":
        posterior.require([ROWS], "cov='full'", "take cov='diag'")
    linear = [name for name, layer in posterior.layers.items() if not layer.convolutional]
    wanted = linear if rows_wanted or cov == "full" else []
    # first the rows, which know the variances too
    rows = {name: posterior.of_layer(name) for name in wanted}
    variances, parameters = posterior.variance(), dict(model.named_parameters())
    found: list[LayerPosterior] = []
    for name, layer in posterior.layers.items():
        of_layer = rows.get(name)
        # independent rows have the marginal variances alone
        row = rows_wanted and of_layer is not None and of_layer.correlated
        weight = parameters[layer.weight]
        found.append(LayerPosterior(layer, weight, variances, of_layer, row, cov == "full"))
    return found


# The correction that gives a head's variances the scale that Monte Carlo over the weights finds.


def posterior_settings(posterior: Posterior) -> SettingsRecord:
    """What a propagated variance depends on beside the blocks: all but the temperature, which divides it afterwards."""
    names = [name for name, about in HYPERPARAMETERS.items() if about.of_weights]
    return SettingsRecord.of(posterior.settings, names)


def fitting_calibration(posterior: Posterior, settings: Mapping[str, Any]) -> ScaleCorrection | None:
    """The calibration in a posterior's record, or None if it was made for other settings of the head.

    One made before the posterior's settings changed is not used, with a warning.
    """
    recorded = posterior.history.calibration
    if recorded is None or recorded.head != settings:
        return None
    if recorded.posterior != posterior_settings(posterior):
        warn_user(
            "The posterior's scale or prior precision changed after fit_scale(); the scale is not used. Fit it again: "
            "predictor = predictor.fit_scale(loader)."
        )
        return None
    return recorded


def fit_scale_correction(
    head_sd: Tensor, drawn_sd: Tensor, n_mc: int, slope: bool, head: dict[str, Any], posterior: SettingsRecord
) -> ScaleCorrection:
    """The calibration of a head's standard deviations ``(samples, outputs)`` to those over `n_mc` draws, at these
    settings of the head and of the posterior.
    """
    usable = (head_sd > 0) & (drawn_sd > 0)
    fitted, held_out = usable.clone(), usable.clone()
    fitted[1::2], held_out[0::2] = False, False
    if not fitted.any() or not held_out.any():
        raise PosthocUQError("No output varies under the posterior, so there is no scale to fit.")
    x, y = head_sd[fitted].log(), drawn_sd[fitted].log()
    beta = 1.0
    if slope and x.numel() > 1 and float(x.var()) > 0:
        centred = x - x.mean()
        beta = float((centred * (y - y.mean())).sum() / centred.square().sum())
    alpha = float((y - beta * x).median())
    corrected = exp(alpha) * head_sd[held_out] ** beta
    try:
        return ScaleCorrection(
            alpha=alpha,
            beta=beta,
            residual=float((corrected / drawn_sd[held_out] - 1).abs().mean()),
            before=float((head_sd[held_out] / drawn_sd[held_out] - 1).abs().mean()),
            n_mc=n_mc,
            head=head,
            posterior=posterior,
        )
    except ValidationError as error:
        raise PosthocUQError(
            f"The moments head is too far from its draws to be corrected: {fault_of(error, 'the correction')}; predict "
            f"with head='sampling'."
        ) from None


# The moments head: mean and variance of every output in one pass, carried through the model's own code.

WeightsForm = Literal["auto", "row", "marginal"]


class MomentsPredictor(GaussianPredictor):
    """Propagates mean and variance of every activation through the network.

    It does so by the unscented transform at its nonlinearities (Schodt 2024, "Few-sample variational inference of
    Bayesian neural networks with arbitrary nonlinearities"), with the weights' posterior entering at every linear and
    convolution layer.

    One pass, no Monte Carlo error, and gradients. It costs 3 to 9 plain passes of large networks, and 4 to 70 of small
    ones, whose calls weigh more than their products. **With ``cov="diag"`` activations are taken to be independent of
    each other, which loses part of the variance of anything deeper than one hidden layer**: the ranking of inputs stays
    useful, the scale does not; `fit_scale` mends the scale and says what error is left. ``cov="full"`` carries
    covariances through chains of linear and element-wise layers, where it agrees with Monte Carlo, and falls back to
    independence at any other operation. A layer that is used several times is taken to be independent of itself in
    both.

    Args:
        model: the model the posterior was fitted on; its code may be anything built from functions that have a rule.
        posterior: of any method. Layers are independent of each other here, also for ``method="full"``.
        weights: ``"row"`` keeps the covariance of the weights of one output in linear layers with one input row per
            sample, ``"marginal"`` their variances only; ``"auto"`` is ``"row"`` where the posterior knows them.
            Convolutions, and linear layers on tokens, always use variances.
        cov: ``"diag"`` or ``"full"``.
        relu: ``"unscented"``, or ``"exact"`` for the closed form of ReLU and LeakyReLU (where no covariance is
            carried).
        max_pool: ``"clark"``, the maximum of independent Gaussians, or ``"argmax"``, the variance of the largest mean:
            faster; worse where cells of a window vary a little and independently, nearer to the truth for broad
            posteriors, under which neighbouring cells vary together.
        pool_rho: correlation assumed between the cells of an average, in [0, 1].
        unknown: what to do with a function that has no rule: ``"error"``, or ``"unscented"``, the unscented rule along
            32 random directions of its inputs.
        kappa: of the unscented transform of functions of one entry, at least 0; its outer points are
            ``sqrt(kappa + 1)`` deviations away. 2 is exact for means of polynomials up to degree 5 and variances up to
            degree 2. By default that of the training (`UTVI`), or 2.
        link: from Gaussian outputs to a prediction: ``"mc"``, of logits ``"probit"`` or ``"bridge"``, or another of
            the likelihood's `links`. With ``cov="diag"`` there are variances alone: outputs count as independent, also
            where they vary together, which makes predictions too cautious.
        n_draws: points of the outputs, for ``"mc"``; see `LinearizedPredictor`.
        novelty: whether predictions know their novelty, if the posterior does: one plain forward pass more.

    Raises:
        PosthocUQError: an option has another value than those listed.
    """

    head = "moments"
    needs = frozenset({VARIANCES})

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        *,
        weights: WeightsForm = "auto",
        cov: Covariances = "diag",
        relu: Relu = "unscented",
        max_pool: MaxPool = "clark",
        pool_rho: Unit = 0.0,
        unknown: Unknown = "error",
        kappa: Kappa | None = None,
        link: str = "mc",
        n_draws: Count = LINK_DRAWS,
        novelty: bool = True,
    ) -> None:
        super().__init__(model, posterior, novelty, link, n_draws)
        self._weights = check_option("weights", weights, WeightsForm)
        self._rules = Rules(
            check_option("relu", relu, Relu),
            check_option("max_pool", max_pool, MaxPool),
            check_option("pool_rho", pool_rho, Unit),
            check_option("cov", cov, Covariances),
            check_option("unknown", unknown, Unknown),
            posterior.history.fit.get("kappa", KAPPA)
            if kappa is None
            else check_option("kappa", kappa, Kappa),
        )
        with isolated_random_state():  # copying a module may run its code
            # a tuple hides it from `nn.Module`
            self._replica = (replicate(self._model[0], posterior.trained_mean),)
        self._frozen = FrozenPart(self.network, posterior.mean)
        self._checked, self._unused = False, frozenset[str]()
        self._take_weights()

    def _take_weights(self) -> None:
        """Take the distribution of the weights, and the correction of variances, from the posterior."""
        with isolated_random_state():
            self._layers = (layer_posteriors(self.network, self._posterior, self._weights, self._rules.cov),)
        self._calibration = fitting_calibration(self._posterior, self.settings())

    def with_posterior(self, posterior: Posterior, seed: int | None = None) -> MomentsPredictor:
        """See `Predictor`."""
        other = super().with_posterior(posterior)
        if posterior.settings.of_weights() != self._posterior.settings.of_weights():
            other._take_weights()
        elif posterior.history.calibration is not self._posterior.history.calibration:
            other._calibration = fitting_calibration(posterior, self.settings())
        return other

    def _apply(self, fn: Any, recurse: bool = True) -> MomentsPredictor:
        super()._apply(fn, recurse)
        for module in (self.network, *self.noises):
            module._apply(fn)  # pyright: ignore[reportPrivateUsage]
        self._frozen = FrozenPart(self.network, self._posterior.mean)
        return self

    @property
    def network(self) -> nn.Module:
        """The model at the posterior's mean."""
        return self._replica[0]

    @property
    def noises(self) -> list[LayerPosterior]:
        """The posteriors of the layers."""
        return self._layers[0]

    def identity(self) -> dict[str, Any]:
        """See `Predictor`."""
        calibration = self.scale_correction
        calibrated = [] if calibration is None else [calibration.alpha, calibration.beta]
        return {**super().identity(), **self.settings(), "calibrated": calibrated}

    def settings(self) -> dict[str, Any]:
        """The choices that change the propagated variance, as plain values."""
        settings = {"weights": self._weights, **asdict(self._rules)}
        if self._rules.kappa == KAPPA:
            del settings["kappa"]  # as in files from before it could be chosen
        elif isinstance(self._rules.kappa, Mapping):
            settings["kappa"] = "learned"
        return settings

    @property
    def scale_correction(self) -> ScaleCorrection | None:
        """How the variance is corrected, or None."""
        return self._calibration

    def extra_repr(self) -> str:
        """The choices, and the calibration with the error it leaves."""
        text = ", ".join(f"{name}={value!r}" for name, value in self.settings().items())
        return f"{text}, {self._calibration or 'not calibrated'}"

    @reading
    def propagate(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Mean, variance and, with ``cov="full"`` where the last layers allow it, covariance of the outputs, before
        temperature, observation noise and calibration.

        Differentiable; outputs may have any shape ``(batch, ...)``, the covariance is ``(batch, outputs, outputs)``.

        Raises:
            PosthocUQError: a function has no rule, or writes into an activation.
        """
        return self._propagate(self._batch(args, kwargs))

    def _propagate(self, batch: Batch, rest: nn.Module | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """`propagate`, through the whole network or the rest of it."""
        network, layers = self.network if rest is None else rest, self._posterior.layers
        parameters, of_layers = dict(network.named_parameters()), self.noises
        weights = [(parameters[layers[p.layer].weight], p) for p in of_layers]
        outputs = propagate(
            lambda: batch.fresh().call_any(network),
            [pair for pair in weights if not layers[pair[1].layer].rule.by_gradients],
            self._rules,
            partial(running_module, network),
            # a product with such a weight need not be all of its use
            [
                pair
                for pair in weights
                if layers[pair[1].layer].rule.by_gradients and pair[1].layer not in self._unused
            ],
        )
        if not self._checked:
            self._checked = True
            unused = [p.layer for p in of_layers if p.layer not in outputs.used]
            self._unused = frozenset(unused)
            if unused:
                warn_user(
                    f"The pass did not use the posterior of {unused[:8]}, as far as the rules can see (weights that "
                    f"are computed anew at every call, or layers that did not run); their uncertainty is missing."
                )
        covariance = None if outputs.covariance is None else batch.outputs_of(outputs.covariance)
        return batch.outputs_of(outputs.mean), batch.outputs_of(outputs.variance), covariance

    def _moments(self, batch: Batch, rest: nn.Module | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """`propagate`, in parts of the batch where covariances do not fit into memory.

        Args:
            batch: of the network, or features.
            rest: what takes features, or None.
        """
        if self._rules.cov == "diag" or torch.compiler.is_compiling():
            return self._propagate(batch, rest)
        samples = count_samples(batch)
        widths = [m.out_features for m in self.network.modules() if isinstance(m, nn.Linear)]
        step = max(1, TEMPORARY_BYTES // (8 * 4 * max(widths, default=1) ** 2))
        parts = [
            self._propagate(batch.narrow(start, min(step, samples - start), samples))
            for start in range(0, samples, step)
        ]
        covariances = [covariance for _, _, covariance in parts if covariance is not None]
        return (
            torch.cat([mean for mean, _, _ in parts]),
            torch.cat([variance for _, variance, _ in parts]),
            torch.cat(covariances) if len(covariances) == len(parts) else None,
        )

    @reading
    def functional_mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """The propagated mean of the outputs."""
        batch = self._batch(args, kwargs)
        with self.explaining(batch):
            return self._moments(batch)[0]

    @reading
    def functional_variance(self, *args: Any, **kwargs: Any) -> Tensor:
        """Variance over the weights of every raw output of the model, shaped like the outputs; calibrated where there
        is a calibration for these settings.

        Raises:
            NonFiniteError: it is not finite.
        """
        batch = self._batch(args, kwargs)
        with self.explaining(batch):
            variance = self._distribution(batch).variance
        check_finite({"variance": variance}, "functional variance", self.head)
        return variance

    def _functions(self, batch: Batch, n: int, generator: torch.Generator) -> Tensor:
        """See `Predictor`; independent between inputs."""
        outputs = self._distribution(batch)
        mean, variance = at_least_float32(outputs.mean), at_least_float32(outputs.variance)

        def normals(*shape: int) -> Tensor:
            drawn = torch.randn(n, *shape, generator=generator, dtype=torch.float64, device=generator.device)
            return drawn.to(mean)

        if outputs.covariance is None:
            deviations = variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt() * normals(*mean.shape)
        else:
            root = symmetric_root(cast(Tensor, outputs.covariance)).to(mean)
            deviations = torch.einsum("bkr,sbr->sbk", root, normals(len(mean), root.shape[2]))
        return mean + deviations.reshape(n, *mean.shape)

    def _predict(self, batch: Batch) -> Prediction:
        ratio = self._known_novelty(batch)
        distribution = self._distribution(batch)
        return self.promising(self.prediction_of(distribution), distribution).with_novelty(ratio)

    def _distribution(self, batch: Batch, rest: nn.Module | None = None) -> OutputGaussian:
        """Calibrated where there is a calibration for these settings."""
        mean, variance, covariance = self._moments(batch, rest)
        if self._calibration is not None:
            corrected = self._calibration.apply(variance)
            if covariance is not None:
                ratio = (corrected / variance.clamp(min=torch.finfo(variance.dtype).tiny)).sqrt()
                covariance = covariance * ratio.unsqueeze(2) * ratio.unsqueeze(1)
            variance = corrected
        return OutputGaussian(mean, variance, covariance)

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """See `Predictor`; None with ``cov="full"``, which cuts batches into parts."""
        return None if self._rules.cov == "full" else self._frozen.features(self._batch(args, kwargs))

    def distribution_from(self, features: Features) -> OutputGaussian:
        """See `Predictor`."""
        self.check_weights()
        return self._distribution(features.batch, self._frozen.rest(features))

    @property
    def _network(self) -> nn.Module:
        return self.network

    @reading
    def fit_scale(
        self,
        loader: Iterable[Any],
        n_mc: int = 64,
        *,
        slope: bool = False,
        samples: int = 256,
        batch_to_inputs: BatchFunction | None = None,
        progress: bool | None = None,
    ) -> MomentsPredictor:
        """A predictor whose variance has the scale that Monte Carlo over the weights finds on a few inputs.

        Fits ``log sd_MC = alpha + log sd`` (median; with `slope` ``alpha + beta log sd``) on every other input, and
        measures the remaining error on the others; of outputs with positions by those that labels and the attention
        mask leave in. `scale_correction` says what was found; the new predictor's `posterior` keeps it, and is what to
        save.

        Args:
            loader: of inputs, such as held-out data; its first `samples` are used.
            n_mc: draws of the weights; their standard deviations are off by ``1 / sqrt(2 n_mc)`` relative.
            slope: also fit a power.
            samples: inputs to use.
            batch_to_inputs: takes the model's inputs out of a batch of any other form.
            progress: whether to show a bar; by default on a terminal.

        Raises:
            PosthocUQError: the loader is none or yields too little, or no output varies.
        """
        if n_mc < 2 or samples < 2:
            raise PosthocUQError(
                f"fit_scale needs at least 2 draws and 2 inputs, not n_mc={n_mc}, samples={samples}."
            )
        check_loader(loader)
        posterior, model = self._posterior, self._model[0]
        sampler = SamplingPredictor(model, posterior, n_samples=1)
        by_head, by_draws, seen = list[Tensor](), list[Tensor](), 0
        reader = BatchReader.of(model, batch_to_inputs)
        with (
            steady(self.model, call="fit_scale"),
            torch.no_grad(),
            isolated_random_state(),
            Bar(loader, "fit scale", bars_shown(progress)) as bar,
        ):
            for batch in batches(loader, reader):
                count = count_samples(batch)
                if seen + count > samples:
                    batch = batch.narrow(0, samples - seen, count)
                by_head.append(as_double(self._counted_variance(batch)).cpu())
                seed = torch.Generator().manual_seed(0)  # the same draws for all batches
                outputs = sampler.functional_samples(batch, n_samples=n_mc, generator=seed)
                by_draws.append(as_double(outputs).var(0).cpu())
                seen += by_head[-1].shape[0]
                bar.advance(by_head[-1].shape[0])
                if seen >= samples:
                    break
        if seen < 2:
            raise PosthocUQError("fit_scale needs at least 2 inputs, and the loader yields fewer.")
        head_sd, drawn_sd = (torch.cat(parts).reshape(seen, -1).sqrt() for parts in (by_head, by_draws))
        made_for = self.settings(), posterior_settings(posterior)
        scaled = posterior.noted(calibration=fit_scale_correction(head_sd, drawn_sd, n_mc, slope, *made_for))
        scaled.warn_if_void(posterior)
        return self.with_posterior(scaled)

    def _counted_variance(self, batch: Batch) -> Tensor:
        """The variance of a batch's outputs, 0 at positions that do not count."""
        variance = self._moments(batch)[1]
        layout = self._posterior.likelihood.positions_of(variance)
        if layout is None:
            return variance
        counted = (
            counted_positions(layout, variance, batch).reshape(-1, 1).expand(-1, layout.classes(variance))
        )
        return variance.masked_fill(~layout.whole(counted, layout.positions(variance)), 0.0)
