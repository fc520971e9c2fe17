"""`Likelihood`, the base class: what targets are; and `DrawnPrediction`, the prediction where it gives no other."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from inspect import signature
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from posthoc_uq.core.batches import as_targets
from posthoc_uq.core.devices import as_double, at_least_float32, host_double, widest_dtype
from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import check_option, check_probability
from posthoc_uq.core.randomness import mix, sample_keys, uniforms
from posthoc_uq.core.records import Record
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.conformal import ConformalScores, SetScore, TargetScores
from posthoc_uq.likelihoods.draws import LINK_DRAWS, OutputGaussian, mean_of, moments_of, moments_of_mixture
from posthoc_uq.likelihoods.labels import Layout
from posthoc_uq.likelihoods.prediction import (
    LEVELS,
    Missing,
    Prediction,
    ValueTensors,
    by_input,
    check_rows,
    interval_quality,
    sampling_generator,
)

Fisher = Literal["mc", "exact", "empirical"]
Faults = Iterator[tuple[Tensor, Callable[[], str]]]
"""What may be wrong with numbers: a flag on their device, and a sentence about it."""
Self = TypeVar("Self", bound="Likelihood")

_IN_SUPPORT = (
    0.5  # in place of a target that is missing: at it every usual density, and its gradient, is finite
)
_MIN_AGREEMENT = 0.75  # share of the trained model's decisions that drawn models should share
_MAX_LOG_RATIO = 50.0  # of densities in a divergence by draws: larger ones add nothing
_BY_DISTRIBUTION = ("log_prob", "log_terms", "mean", "variance", "entropy", "cdf")  # what follows from it
_RENAMED = {  # methods of 0.2.0: without an error, one in a subclass would have no effect
    "takes": "accepts_output_count",
    "agrees": "decisions_agree",
    "fault": "validation_error",
    "of_targets": "for_scoring",
    "seems_applied": "looks_like_probabilities",
}


class Likelihood:
    """``p(y | outputs)`` for one sample; subclass it to add one.

    Either `distribution` or `log_prob` must be written. Every other method has a default, or raises an error that names
    the missing method; `docs/guides/new_likelihood.md` says which method is for what. Outputs are ``(samples, ...)``,
    the first dimension counts the samples, and a sample's outputs and targets depend on no other's.

    Attributes:
        name: in reports, messages and files; by default that of the class.
        logits: outputs are logits, which a posterior's temperature divides.
        softmax: outputs are logits of several classes. Adding a number to all of them changes nothing, and heads may
            use those of the most probable classes alone.
        class_logits: each output is the logit of a class or a label, to which a shift of its own may be added.
        joint: whether a prediction from Gaussian outputs needs the covariance of a sample's outputs.
        links: the names that a head takes as ``link=``; what each of them means, `from_gaussian` says.
        fields: what a file may hold of the `attributes` besides the name; for the likelihoods of this package.
        noise_variance: of Gaussian observation noise, ``(outputs,)`` or ``(1,)`` float64, in squared units of the
            targets; None where there is no such noise. Tuning scales it.
        has_noise: whether there is a noise, or dispersion, that `at_noise_scale` scales.
        scale_from_data: which of the ``"mean"`` and the ``"std"`` of the training targets a fit is to find.
        missing: ``"ignore"`` where NaN stands for a target that is not there. Of several targets a sample the others
            count; a sample without any is left out as it is read.
        head_likelihoods: of several heads (`posthoc_uq.likelihoods.joint`), by name; else empty.

    Example:
        ```python
        from torch.distributions import Laplace

        class Absolute(uq.Likelihood):
            name = "absolute"

            def distribution(self, outputs):
                return Laplace(outputs, 0.1)

        data = regression_loader
        posterior = uq.fit(regressor, data, likelihood=Absolute())
        ```
    """

    name: str = ""
    scale_from_data: tuple[str, ...] = ()
    missing: Missing = "error"
    logits: ClassVar[bool] = False
    softmax: ClassVar[bool] = False
    class_logits: ClassVar[bool] = False
    joint: ClassVar[bool] = True
    links: ClassVar[tuple[str, ...]] = ("mc",)
    fields: ClassVar[type[Record]] = Record
    noise_variance: Tensor | None = None
    head_likelihoods: Mapping[str, Likelihood] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        given = vars(cls)
        if (
            "from_draws" in given
            or len(signature(given.get("from_gaussian", cls.from_gaussian)).parameters) != 2
        ):
            raise PosthocUQError(
                f"Likelihood {cls.__name__} overrides from_draws, or from_gaussian with other arguments than (self, "
                f"outputs), as of 0.2.0; override from_blocks(self, blocks) and from_gaussian(self, outputs) instead."
            )
        old = next((name for name in _RENAMED if callable(given.get(name))), None)
        if old:
            raise PosthocUQError(
                f"Likelihood {cls.__name__} defines {old}, which is {_RENAMED[old]} as of 0.3.0; rename the method."
            )
        if not cls.name:
            cls.name = cls.__name__

    def defines(self, method: str) -> bool:
        """Whether the subclass gives this method, itself or by its `distribution` or `fisher_root`."""
        names = [method]
        names += ["distribution"] if method in _BY_DISTRIBUTION else []
        names += ["fisher_root"] if method == "exact_factors" else []
        return any(getattr(type(self), name) is not getattr(Likelihood, name) for name in names)

    def _lacking(self, method: str, purpose: str) -> PosthocUQError:
        return PosthocUQError(f"Likelihood {self.name!r} {purpose}; give it a method {method}.")

    def _by_distribution(self, method: str, outputs: Tensor, of: Callable[[Distribution], Tensor]) -> Tensor:
        """What the `distribution` gives in place of a method that the subclass does not give.

        Raises:
            PosthocUQError: the subclass gives neither, or torch's distribution does not have it.
        """
        if self.defines("distribution"):
            try:
                return of(self.distribution(at_least_float32(outputs)))
            except NotImplementedError:
                pass
        raise PosthocUQError(
            f"Likelihood {self.name!r} has no method {method}, which this needs; give it that, or a "
            f"distribution(outputs) that has it."
        )

    # Checks of outputs and targets

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        """Raise `PosthocUQError` where outputs or targets have the wrong shape, type or range."""
        for wrong, text in self.faults(outputs, targets):
            if bool(wrong):
                raise PosthocUQError(text())

    def validation_error(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        """`check` for a loop that must not wait for the device at every batch. Shapes and types are checked at once.
        The result is a flag on the device, true where `check` would raise for the range, or None where all is checked.
        """
        if type(self).check is Likelihood.check:
            flags = [wrong for wrong, _ in self.faults(outputs, targets)]
            return reduce(torch.logical_or, flags) if flags else None
        self.check(outputs, targets)
        return None

    def faults(self, outputs: Tensor, targets: Tensor | None) -> Faults:
        """What may be out of range: a flag on the device, true where it is, and what `check` says then. By default
        whether targets are not finite. Nothing is asked of the targets where they are None.

        Raises:
            PosthocUQError: a shape or a type is wrong; by default where there are not as many targets as samples, or,
                where each has a density (`log_terms`), as outputs.
        """
        if targets is None:
            return
        one_an_output = self.defines("log_terms")
        if targets.shape[:1] != outputs.shape[:1] or (one_an_output and targets.numel() != outputs.numel()):
            raise PosthocUQError(
                f"Targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}"
                f"{', one for each; choose the columns that the model predicts' if one_an_output else ''}."
            )
        yield self._not_finite(targets), lambda: self._not_finite_in_words(targets)

    def _not_finite(self, targets: Tensor) -> Tensor:
        """A flag on the device, true where a target is not finite that is not missing."""
        return ~torch.isfinite(targets).all() if self.missing == "error" else targets.isinf().any()

    def _not_finite_in_words(self, targets: Tensor) -> str:
        """What an error says of such targets."""
        return f"Some targets are not finite.{self._hint_of_missing(targets)}"

    def _hint_of_missing(self, targets: Tensor) -> str:
        """The way out where there is a NaN, and the likelihood can leave it out."""
        if self.missing == "ignore" or "missing" not in self.fields.model_fields:
            return ""
        call = f"uq.{type(self).__name__}(missing='ignore')"
        nan = targets.is_floating_point() and bool(targets.isnan().any())
        return f" If NaN stands for a target that is not there: likelihood={call}." if nan else ""

    # Targets that are not there

    def _take_missing(self, missing: Missing) -> None:
        """Set `missing` by an option of the constructor."""
        if (found := check_option("missing", missing, Missing)) != self.missing:
            self.missing = found  # a file holds what is not the default

    def ignoring_missing(self: Self) -> Self:
        """This likelihood with ``missing="ignore"``, or itself where it has no such option."""
        if "missing" not in self.fields.model_fields:
            return self
        likelihood = copy.copy(self)
        likelihood.missing = "ignore"
        return likelihood

    def there(self, targets: Tensor) -> Tensor | None:
        """Which targets are there, booleans in their shape; None for all of them."""
        return None if self.missing == "error" else ~targets.isnan()

    def in_support(self, targets: Tensor) -> Tensor:
        """Targets whose density is finite: those that are missing are replaced."""
        if self.missing == "error" or not targets.is_floating_point():
            return targets
        return targets.masked_fill(targets.isnan(), _IN_SUPPORT)

    def where_there(self, values: Tensor, targets: Tensor) -> Tensor:
        """Values ``(..., *shape of the targets)``, 0 where a target is missing."""
        return values if self.missing == "error" else values.masked_fill(targets.isnan(), 0.0)

    def terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`log_terms`, 0 where a target is missing."""
        if self.missing == "error":
            return self.log_terms(outputs, targets)
        return self.where_there(self.log_terms(outputs, self.in_support(targets)), targets)

    def accepts_output_count(self, outputs: int) -> bool:
        """Whether a model may have so many outputs a sample."""
        try:
            return not any(
                bool(wrong) for wrong, _ in self.faults(torch.zeros(1, outputs, device="cpu"), None)
            )
        except PosthocUQError:
            return False

    def looks_like_probabilities(self, outputs: Tensor) -> bool:
        """Whether the outputs look as if the model had applied the link already, as a softmax at its end does.

        Args:
            outputs: ``(samples, ...)``, in [0, 1], with their autograd graph. Asked only where outputs are `logits`.
        """
        return False

    def positions_of(self, outputs: Tensor) -> Layout | None:
        """Where outputs have positions, each with a prediction of its own: how they are laid out. Else None."""
        return None

    def layout_of_targets(self, targets: Tensor) -> Layout | None:
        """`positions_of` the outputs that these targets are of."""
        return None

    # The density and its gradients

    def distribution(self, outputs: Tensor) -> Distribution:
        """The distribution of targets that are independent given the outputs, in one batch of torch's distributions,
        such as ``torch.distributions.Poisson(outputs.exp(), validate_args=False)``: a look at all numbers, which torch
        takes by default, waits for the device and cannot be exported.

        `log_prob`, `log_terms`, `cdf`, `mean`, `variance` and `entropy` follow from it.
        """
        raise self._lacking("distribution(outputs)", "has no distribution of targets")

    def reshape_targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The targets in the shape of the outputs and in their precision."""
        return targets.to(device=outputs.device, dtype=at_least_float32(outputs).dtype).reshape(outputs.shape)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log p(y | outputs)`` of every sample, ``(samples,)``, in nats; differentiable in the outputs."""
        if not self.defines("log_terms"):
            raise self._lacking("distribution(outputs) or log_prob(outputs, targets)", "has no density")
        terms = self.terms(at_least_float32(outputs), self.reshape_targets(outputs, targets))
        return terms.flatten(1).sum(1) if terms.ndim > 1 else terms

    def weighted_log_prob(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """``sum_t w_t log p(y_t | f_t)`` of every sample, ``(samples,)``, in nats, for weights of positions
        ``(samples, positions)``; for likelihoods whose outputs have positions (`positions_of`). Differentiable.
        """
        raise self._lacking(
            "weighted_log_prob(outputs, targets, weights)", "has no log-probability of single positions"
        )

    def log_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log p(y_k | f_k)`` of every single output, shaped like them, where targets are independent given the
        outputs. Outputs may have dimensions before those of the targets.
        """
        return self._by_distribution("log_terms", outputs, lambda law: law.log_prob(targets))

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``P(Y_k <= y_k | f_k)`` of every single output, shaped like them."""
        return self._by_distribution("cdf", outputs, lambda law: law.cdf(targets))

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Gradient of ``-log p(y | outputs)`` by the outputs, shaped like them; by default by autograd."""
        with torch.inference_mode(False), torch.enable_grad():
            inputs = at_least_float32(outputs.detach()).clone().requires_grad_()
            (gradient,) = torch.autograd.grad(-self.log_prob(inputs, targets).sum(), inputs)
        return gradient

    def draw(self, outputs: Tensor, keys: Tensor, draw: int) -> Tensor:
        """Targets drawn from ``p(y | outputs)``, ``(samples, ...)``: a function of the outputs, the keys ``(samples,)``
        and the number of the draw; all random numbers come from `uniforms`.
        """
        raise self._lacking("draw(outputs, keys, draw)", "draws no targets")

    @staticmethod
    def uniforms(outputs: Tensor, keys: Tensor, draw: int, numbers: int = 1) -> Tensor:
        """Random numbers in (0, 1) for `draw`, ``(samples, numbers)``: on the outputs' device, in float64, or in
        float32 where the device has no float64.
        """
        numbers_of_draw = uniforms(keys, (draw + 1) * numbers)[:, draw * numbers :]
        return numbers_of_draw.to(device=outputs.device, dtype=widest_dtype(outputs.device))

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """The root of the Fisher by the outputs where that is diagonal, shaped like them: of ``Var(d log p / d f_k)``
        for every output.
        """
        raise self._lacking("fisher_root(outputs) or exact_factors(outputs)", "has no exact Fisher")

    def exact_factors(self, outputs: Tensor, there: Tensor | None = None) -> Iterator[Tensor]:
        """Tensors ``v`` like the outputs with ``sum v v^T`` = the Fisher of a sample by its outputs; as few as
        possible, since each costs a backward pass. By default one an output, by `fisher_root`; where neither is given,
        the Fisher is by drawn labels.

        Args:
            outputs: ``(samples, ...)``.
            there: which targets are there, booleans in their shape; None for all. A subclass that never ignores missing
                targets need not take it.
        """
        if not self.defines("exact_factors"):
            raise self._lacking(
                "fisher_root(outputs) or exact_factors(outputs)",
                "has no exact expectation over labels, take fisher='mc'",
            )
        root = self.fisher_root(outputs)
        if there is not None:
            root = root.masked_fill(~self.by_output(there, outputs), 0.0)
        flat = root.flatten(1) if root.ndim > 1 else root.unsqueeze(1)
        for index in range(flat.shape[1]):
            factor = torch.zeros_like(flat)
            factor[:, index] = flat[:, index]
            yield factor.reshape(root.shape)

    def by_output(self, of_targets: Tensor, outputs: Tensor) -> Tensor:
        """Values of targets at the outputs that they depend on, in the shape of the outputs; by default one target an
        output.
        """
        return of_targets.reshape(outputs.shape)

    def _exact_factors(self, outputs: Tensor, there: Tensor) -> Iterator[Tensor]:
        """`exact_factors` of the targets that are there.

        Raises:
            PosthocUQError: a subclass's own does not know which these are.
        """
        if len(signature(self.exact_factors).parameters) < 2:
            raise PosthocUQError(
                f"Likelihood {self.name!r} ignores missing targets, and its exact_factors(outputs) is not told of "
                f"them; give it exact_factors(outputs, there), or take fisher='mc'."
            )
        return self.exact_factors(outputs, there)

    def gradients(
        self, outputs: Tensor, targets: Tensor | None, keys: Tensor, fisher: Fisher, n_samples: int = 1
    ) -> Iterator[Tensor]:
        """Tensors ``v``, shaped like the outputs, to pull back through the network: the Fisher of a sample is the sum
        over them of the outer products of the pulled-back gradients (losses are summed over the batch).
        """
        outputs = outputs.detach()
        there = None if targets is None or self.missing == "error" else self.there(targets)
        if fisher == "exact":
            yield from self.exact_factors(outputs) if there is None else self._exact_factors(outputs, there)
        elif fisher == "mc":
            for draw in range(n_samples):
                drawn = self.draw(outputs, keys, draw)
                if there is not None:
                    drawn = drawn.to(at_least_float32(outputs)).masked_fill(
                        ~there.reshape(drawn.shape), math.nan
                    )
                yield self.score(outputs, drawn) * n_samples**-0.5
        else:
            if targets is None:
                raise PosthocUQError(
                    "fisher='empirical' needs labels, and the loader yields inputs alone; use fisher='mc'."
                )
            yield self.score(outputs, targets)

    def expected_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """``E[log p(y | f)]`` of every sample for outputs ``f ~ N(mean, variance)``, ``(samples,)``, in nats; by
        default as for `predictive_log_prob`. Arguments are the same.
        """
        logs, weights = self._at_nodes(mean, variance, targets, n_draws)
        return (logs * weights).sum(0).sum(1)

    def predictive_log_prob(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int = LINK_DRAWS
    ) -> Tensor:
        """``log E[p(y | f)]`` of every sample for outputs ``f ~ N(mean, variance)``, ``(samples,)``, in nats: how the
        prediction rates the targets. Outputs count as independent: by default by Gauss-Hermite quadrature for each
        where there are `log_terms`, else over quasi-random draws. Differentiable.

        Args:
            mean: ``(samples, ...)``.
            variance: of the same shape.
            targets: as in `log_prob`.
            n_draws: of the outputs, where neither a closed form nor quadrature is used.
        """
        logs, weights = self._at_nodes(mean, variance, targets, n_draws)
        return torch.logsumexp(logs + weights.log(), 0).sum(1)

    def _at_nodes(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int
    ) -> tuple[Tensor, Tensor]:
        """Log probabilities ``(nodes, samples, terms)`` at nodes of the outputs, and the nodes' weights."""
        if self.defines("log_terms"):
            values = self.reshape_targets(mean, targets)
            logs, weights = at_nodes(lambda outputs: self.terms(outputs, values), mean, variance)
            if logs.shape[2] == mean[0].numel():  # not so for a distribution of all outputs together
                return logs, weights
        return self._at_draws(mean, variance, targets, n_draws)

    def _at_draws(
        self, mean: Tensor, variance: Tensor, targets: Tensor, n_draws: int
    ) -> tuple[Tensor, Tensor]:
        """The same at quasi-random draws of the outputs, one term a sample."""
        draws = OutputGaussian(mean, variance, n_draws=n_draws).draws()
        logs = torch.stack([self.log_prob(outputs, targets) for outputs in draws]).unsqueeze(2)
        return logs, torch.full_like(logs[:, :1, :1], 1 / n_draws)

    # The target

    def mean(self, outputs: Tensor) -> Tensor:
        """``E[y | outputs]``, ``(samples, ...)``, in units of the targets."""
        return self._by_distribution("mean", outputs, lambda law: law.mean)

    def variance(self, outputs: Tensor) -> Tensor:
        """``Var[y | outputs]``, shaped like `mean`, in squared units of the targets."""
        return self._by_distribution("variance", outputs, lambda law: law.variance)

    def entropy(self, outputs: Tensor) -> Tensor:
        """``H[y | outputs]`` of every sample, ``(samples,)``, in nats; by which a temperature is matched."""
        entropies = self._by_distribution("entropy", as_double(outputs), lambda law: law.entropy())
        return entropies.flatten(1).sum(1) if entropies.ndim > 1 else entropies

    def measures(self, mean: Tensor, targets: Tensor) -> dict[str, float]:
        """Measures of how good predicted means are, by name, which `posthoc_uq.evaluate` shows beside its own."""
        return {}

    # Predictions

    def from_draws(self, outputs: Tensor) -> Prediction:
        """The prediction from outputs of several draws of the weights, ``(draws, samples, ...)``, by `from_blocks`."""
        return self.from_blocks([outputs])

    def from_blocks(self, blocks: Iterable[Tensor]) -> Prediction:
        """The prediction from outputs of drawn weights that come block by block, ``(draws, samples, ...)`` each. By
        default a `DrawnPrediction`, which keeps all draws; other predictions sum them up.

        Raises:
            PosthocUQError: there is no draw, or the outputs do not fit.
        """
        return DrawnPrediction.from_draws(torch.cat(list(blocks)), self)

    def from_gaussian(self, outputs: OutputGaussian) -> Prediction:
        """The prediction of Gaussian outputs, by their ``link``, one of `links`. By default, and for ``"mc"``, a
        `DrawnPrediction` from quasi-random draws of them.
        """
        return DrawnPrediction.from_draws(outputs.draws(), self, (outputs.mean, outputs.variance))

    def divergence(self, outputs: Tensor, prediction: Any) -> Tensor:
        """``KL(p(y | outputs) || prediction)`` of every sample, ``(samples,)``, in nats; for a
        regression of several outputs, their mean. Without this method there is no faithful prior, and a fit uses the
        evidence; `drawn_divergence` estimates it.

        Args:
            outputs: of the network, divided by the posterior's temperature where they are logits.
            prediction: what a head returns for the same samples.

        Raises:
            PosthocUQError: this likelihood has none.
        """
        raise PosthocUQError(
            f"Likelihood {self.name!r} does not say how far a prediction is from the network's own, which a faithful "
            f"prior needs; give it a method divergence(outputs, prediction), or find the prior precision by the "
            f"evidence or by the likelihood of held-out data."
        )

    @property
    def has_divergence(self) -> bool:
        """Whether `divergence` is defined."""
        return self.defines("divergence")

    def drawn_divergence(self, outputs: Tensor, prediction: DrawnPrediction, n_draws: int = 64) -> Tensor:
        """`divergence` by drawn targets, for a `divergence` without a closed form.

        With ``r = prediction(y) / p(y | outputs)`` it is the mean of ``2 (r - 1 - log r) / (1 + r)`` over targets, half
        from the likelihood and half from the prediction. It is never negative, and its variance is small where the two
        are close.
        """
        # the same in every batch and on every device: of outputs with three digits, since rounding must not change all
        # draws
        keys = sample_keys([outputs.to(torch.bfloat16)], len(outputs), 0)
        half = max(1, n_draws // 2)
        drawn = [self.draw(outputs, keys, draw) for draw in range(half)]
        drawn += prediction.sample(half, torch.Generator().manual_seed(0)).unbind()
        total = outputs.new_zeros(len(outputs))
        for targets in drawn:
            ratio = (prediction.log_prob(targets) - self.log_prob(outputs, targets)).clamp(max=_MAX_LOG_RATIO)
            total = total + 2 * (ratio.exp() - 1 - ratio) / (1 + ratio.exp())
        return total / len(drawn)

    def by_moments(self, outputs: Tensor, targets: Tensor) -> tuple[str, float, float] | None:
        """The name of the parameter of the variance, its value, and the value that the targets suggest, by their
        squared residuals; None without such a parameter.
        """
        return None

    def decisions_agree(self, outputs: Tensor, draws: Tensor) -> bool:
        """Whether models with drawn weights decide as the trained one does; a fit by the evidence warns if not: at
        least three quarters of the decisions stay, label by label and position by position. Of values the mean of the
        draws is not further from the trained mean, in mean square, than the mean noise variance.

        Args:
            outputs: of the trained network, ``(samples, ...)``.
            draws: outputs of models with drawn weights, ``(draws, samples, ...)``.
        """
        trained, drawn = (cast(Any, self.from_draws(each)) for each in (outputs.unsqueeze(0), draws))
        if hasattr(trained, "predicted"):
            return not bool((trained.predicted() == drawn.predicted()).float().mean() < _MIN_AGREEMENT)
        if getattr(trained, "noise_variance", None) is None:
            return True
        squares = (drawn.mean - trained.mean).square().mean(0)
        return not bool((squares > trained.noise_variance.mean(0)).any())

    # Classes, for the novelty of inputs

    def classes(self, outputs: int) -> int:
        """The number of classes of a model with so many outputs; 1 where outputs are no classes."""
        return 1

    def predicted_class(self, outputs: Tensor) -> Tensor:
        """The class of every sample, ``(samples,)`` int64, below `classes`."""
        return torch.zeros(outputs.shape[0], dtype=torch.int64, device=outputs.device)

    def top_probability(self, outputs: Tensor) -> Tensor | None:
        """The probability of `predicted_class`, ``(samples,)``; None where a sample has not one class."""
        return None

    def regression_targets(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Targets as the columns of a least-squares regression, ``(samples, columns)``: one-hot classes, one column of
        two classes, or values. None where the likelihood has no such form, or outputs have positions.
        """
        return None

    def for_scoring(self: Self) -> Self:
        """The likelihood by which predictions are scored, where `log_prob` is another one, of training;
        by default itself.
        """
        return self

    # Observation noise

    def with_noise(self: Self, noise_variance: Tensor) -> Self:
        """A copy with another `noise_variance`, positive; the tensor itself is kept, with its gradients."""
        likelihood = copy.copy(self)
        likelihood.noise_variance = noise_variance
        return likelihood

    @property
    def has_noise(self) -> bool:
        return self.noise_variance is not None or self.defines("at_noise_scale")

    def at_noise_scale(self: Self, factor: float) -> Self:
        """This likelihood with an observation noise `factor` times as large: its noise variance, or a dispersion that
        stands for one; itself where there is none.
        """
        if self.noise_variance is None or factor == 1.0:
            return self
        return self.with_noise(self.noise_variance * factor)

    def residual_sums(
        self, log_likelihood: float, samples: float | Sequence[float], outputs: int
    ) -> tuple[float, float]:
        """The sum of squared residuals over their noise variance, and the number of residuals, by a sum of `log_prob`
        over so many samples, or over samples whose weights have this sum; a number for each output where some targets
        are missing. The log marginal likelihood needs them when the noise variance changes. Zeros where there is no
        noise variance.
        """
        return 0.0, 0.0

    def target_counts(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """How many targets of each noise variance a sample has, ``(samples, noise variances)``, or a position of it,
        ``(samples * positions, noise variances)``, for `residual_sums`; None where all are there, or there is no noise
        variance.
        """
        return None

    # Files

    def attributes(self) -> dict[str, Any]:
        """The plain values that a file keeps of this object, its name among them. By default its attributes whose names
        do not begin with an underscore.

        Raises:
            PosthocUQError: an attribute is not a plain value.
        """
        values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {
            "name": self.name,
            **{name: _plain_value(self.name, name, value) for name, value in values.items()},
        }

    @classmethod
    def restore(cls: type[Self], attributes: Mapping[str, Any]) -> Self:
        """The likelihood with these `attributes`, which are options of the constructor; only called for the likelihoods
        of this package.
        """
        return cls(**{name: attributes[name] for name in cls.fields.model_fields if name in attributes})

    def identity(self) -> dict[str, Any]:
        """What must be the same for a fit to go on where another one stopped."""
        return {"name": self.name, **vars(self)}


def _plain_value(likelihood: str, name: str, value: Any) -> Any:
    """A likelihood's attribute as a file keeps it: a number, a text, a list of them, a dictionary of them by text.

    Raises:
        PosthocUQError: it is none of these.
    """
    if isinstance(value, Tensor):
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain_value(likelihood, name, item) for item in cast(list[Any], value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in cast(dict[Any, Any], value)):
        items = cast(dict[str, Any], value).items()
        return {key: _plain_value(likelihood, name, item) for key, item in items}
    raise PosthocUQError(
        f"Likelihood {likelihood!r} has an attribute {name!r} of the type {type(value).__name__}, which no file can "
        f"keep; give it plain numbers and texts, a name that begins with an underscore, or a method attributes()."
    )


# Autograd nodes that do not change values, by the start of their names.
_PASSING = ("View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Select", "Slice", "Clone", "ToCopy")


def last_function(outputs: Tensor) -> str:
    """The name of the autograd node that made the outputs, before any changes of shape or type."""
    node: Any = outputs.grad_fn
    while node is not None and node.name().startswith(_PASSING):
        node = node.next_functions[0][0]
    return "" if node is None else node.name()


# Gauss-Hermite quadrature over single Gaussian outputs

NODES = 64  # exact for polynomials of degree 127 in the output


@lru_cache(maxsize=1)
def _rule() -> tuple[Tensor, Tensor]:
    """Nodes and weights ``(NODES,)`` for the standard normal distribution."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    with torch.inference_mode(False):  # cached tensors must work with autograd too
        return host_double(nodes.tolist()), host_double((weights / weights.sum()).tolist())


def at_nodes(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """A function's values at the nodes of outputs ``f ~ N(mean, variance)``, each by itself, ``(NODES, samples,
    outputs)``, and the nodes' weights ``(NODES, 1, 1)``, of sum 1.

    Args:
        function: from ``(NODES, samples, ...)`` to the same shape, number by number.
        mean: ``(samples, ...)``.
        variance: of the same shape.
    """
    mean, variance = at_least_float32(mean), at_least_float32(variance)
    nodes, weights = (numbers.to(mean.device, mean.dtype) for numbers in _rule())
    # the root of a variance of 0 has an infinite derivative
    deviation = variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()
    values = function(mean + deviation * nodes.reshape(-1, *[1] * mean.ndim))
    return values.reshape(len(nodes), len(mean), -1), weights.reshape(-1, 1, 1)


# The prediction of a likelihood without one of its own

_MAX_NUMBERS = 2**18  # that a likelihood gets in one call
_DOUBLINGS, _HALVINGS = 40, 60  # of the numbers at which a distribution function is inverted
_MIN_OBSERVATIONS = 1000  # targets drawn for each input, at least, for an interval
_MIN_COUNTED = 250  # where the intervals of many inputs are only counted
_MAX_COUNTED = 2_000_000  # targets drawn for counted intervals, as long as each input has `_MIN_COUNTED`


def by_draw(function: Callable[..., Tensor], outputs: Tensor, *like: Tensor) -> Tensor:
    """A function of outputs ``(batch, ...)``, applied to each of ``(draws, batch, ...)``: ``(draws, batch, ...)``.

    Args:
        function: of outputs and the others.
        outputs: ``(draws, batch, ...)``.
        like: other arguments ``(batch, ...)``, the same for each draw.
    """
    draws, batch = outputs.shape[:2]
    step = draws
    if not torch.compiler.is_compiling():
        step = max(1, _MAX_NUMBERS // max(1, outputs[0].numel()))
    blocks: list[Tensor] = []
    for part in outputs.split(step):
        copies = [other.unsqueeze(0).expand(len(part), *other.shape).flatten(0, 1) for other in like]
        values = function(part.flatten(0, 1), *copies)
        if values.ndim == 0 or values.shape[0] != part.shape[0] * batch:
            raise PosthocUQError(
                f"A likelihood gives a row for each of {part.shape[0] * batch} rows of outputs, not the shape "
                f"{tuple(values.shape)}."
            )
        blocks.append(values.reshape(part.shape[0], batch, *values.shape[1:]))
    return torch.cat(blocks)


@dataclass(frozen=True, eq=False, repr=False)
class DrawnPrediction(Prediction):
    """Draws of a batch's outputs under the posterior, and the likelihood of the targets: the prediction of a likelihood
    without another.

    The predictive is the mixture ``1/S sum_s p(y | f_s)`` over draws ``f_s`` of the model's outputs. Its density needs
    all draws, so this prediction, unlike others, keeps them: ``draws`` times the memory of the outputs.

    Attributes:
        outputs: (batch, draws, ...), of the model under each draw.
        likelihood: of the targets given the outputs.
        functional_mean: (batch, ...), mean of the outputs over the weights, `outputs_mean`.
        epistemic_variance: variance over the weights of the target's mean, in its shape and in squared units of the
            target; where the likelihood has no ``mean``, of the outputs.
        mean: (batch, ...), of the target; None where the likelihood has no ``mean``.
        noise_variance: same shape, mean over the weights of the target's own variance; None where the likelihood has
            no ``variance``. Its sum with `epistemic_variance` is the total (law of total variance).
        novelty_ratio: (batch,), see `Prediction`.
    """

    kind: ClassVar[str] = "draws"
    _not_shown: ClassVar[tuple[str, ...]] = ("outputs",)
    _hidden: ClassVar[tuple[str, ...]] = ("functional_mean",)
    _computed: ClassVar[dict[str, tuple[str, ...]]] = {"variance": ("noise_variance",)}

    outputs: Annotated[Tensor, "batch draws *outputs"]
    likelihood: Likelihood
    functional_mean: Annotated[Tensor, "batch *outputs"]
    epistemic_variance: Annotated[Tensor, "batch *means"]
    mean: Annotated[Tensor | None, "batch *targets"] = None
    noise_variance: Annotated[Tensor | None, "batch *targets"] = None

    @classmethod
    def from_draws(
        cls, outputs: Tensor, likelihood: Likelihood, functional: tuple[Tensor, Tensor] | None = None
    ) -> DrawnPrediction:
        """From outputs under several draws of the weights.

        Args:
            outputs: (draws, batch, ...).
            likelihood: of the targets.
            functional: mean and variance of the outputs, where they are known more accurately than from the draws.

        Raises:
            PosthocUQError: there is no draw, or the outputs are no floating-point numbers.
        """
        outputs = at_least_float32(outputs)
        functional = moments_of([outputs]) if functional is None else functional
        functional_mean, epistemic = functional
        mean = noise_variance = None
        if likelihood.defines("mean"):
            mean, epistemic = moments_of([by_draw(likelihood.mean, outputs)])
            if likelihood.defines("variance"):
                noise_variance = by_draw(likelihood.variance, outputs).mean(0)
        parts = outputs.transpose(0, 1), likelihood, functional_mean, epistemic, mean, noise_variance
        return cls(*parts, missing=likelihood.missing)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, likelihood={self.likelihood.name!r})"

    @property
    def outputs_mean(self) -> Tensor:
        """The mean of the outputs over the weights."""
        return self.functional_mean

    @property
    def default_score(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The standard deviation where it is known, else the epistemic variance."""
        return "epistemic_variance" if self.noise_variance is None else "standard_deviation"

    @property
    def variance(self) -> Tensor:
        """Shape of `mean`: total variance of the target, in its squared units.

        Raises:
            PosthocUQError: the likelihood has no ``mean`` or no ``variance``.
        """
        if self.noise_variance is None:
            raise PosthocUQError(
                f"Likelihood {self.likelihood.name!r} does not say what mean and variance the target has; give it the "
                f"methods mean(outputs) and variance(outputs)."
            )
        return self.epistemic_variance + self.noise_variance

    @property
    def standard_deviation(self) -> Tensor:
        """Shape of `mean`, in units of the target: square root of the total variance."""
        return self.variance.sqrt()

    def log_prob(self, targets: Tensor) -> Tensor:
        """(batch,), in nats: log of the mean over the draws of the likelihood of the targets.

        Args:
            targets: as the likelihood takes them.

        Raises:
            PosthocUQError: the likelihood refuses them.
        """
        targets = as_targets(targets)
        self.likelihood.check(self.functional_mean, targets)
        outputs = self.outputs.transpose(0, 1)
        targets = targets.to(outputs.device)
        if targets.shape != outputs.shape[1:] and not torch.compiler.is_compiling():  # they could broadcast
            check_rows(self.likelihood.log_prob, outputs[0], targets, self.likelihood.name)
        logs = by_draw(self.likelihood.log_prob, outputs, targets)
        return torch.logsumexp(logs, dim=0) - math.log(outputs.shape[0])

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """`n` targets of every input, (n, batch, ...), each from the likelihood of one of the draws, chosen evenly.

        Args:
            n: targets per input.
            generator: of the random numbers; without one they differ from call to call.

        Raises:
            PosthocUQError: `n` is below 1, or the likelihood draws no targets.
        """
        generator = sampling_generator(n, generator)
        draws, device = self.outputs.shape[1], generator.device
        keys = torch.randint(-(2**63), 2**63 - 1, (draws, len(self)), generator=generator, device=device)
        targets = self._observations(keys.to(self.outputs.device), -(-n // draws))
        return targets[
            torch.randperm(len(targets), generator=generator, device=device)[:n].to(targets.device)
        ]

    def _observations(self, keys: Tensor, rounds: int) -> Tensor:
        """Targets ``(rounds * draws, batch, ...)`` by keys ``(draws, batch)``."""
        flat = self.outputs.transpose(0, 1).flatten(0, 1)
        drawn = [self.likelihood.draw(flat, keys.flatten(), number) for number in range(rounds)]
        return torch.cat([targets.unflatten(0, tuple(keys.shape)) for targets in drawn])

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Bounds, shaped like the target, between which it falls with probability `level` or a little more: quantiles
        of at least a thousand drawn targets, with the same random numbers for every input and call.

        Where the posterior has held-out scores that apply (`posthoc_uq.calibrate`), all values y with
        ``|F(y | x) - 1/2| <= q`` lie within the bounds, with the predictive distribution function F and the
        ``ceil((n + 1) level)``-th smallest q of the held-out targets' (Chernozhukov, Wuethrich, Zhu, "Distributional
        conformal prediction", 2021). A bound is infinite where F was 0 or 1 at that many held-out targets.

        Raises:
            PosthocUQError: `level` is not strictly between 0 and 1, there are too few held-out scores for it, or the
                likelihood draws no targets.
        """
        if isinstance(self.promises, ConformalScores) and self.promises.kind == "cdf":
            return self.within(self.promises.bounds("cdf", level, math.prod(self.outputs.shape[2:])))
        return self._intervals((check_probability("level", level),), _MIN_OBSERVATIONS)[level]

    def within(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of the values whose scores (`target_scores`) are at most these, one an output."""
        outputs = self.outputs.shape[2:]
        reach = scores.reshape(outputs or (1,))
        reach = (reach if outputs else reach.squeeze(0)).to(self.outputs)
        lower, upper = self._first_value(0.5 - reach), self._first_value(0.5 + reach)
        # a distribution function rounds to 1 at some value, and targets beyond it have the same score
        return lower, upper.masked_fill(reach >= 0.5, math.inf)

    def quantile(self, q: float) -> Tensor:
        """Shaped like the target: the value below which it falls with probability `q`, a quantile of at least a
        thousand drawn targets, as for `interval`.

        Raises:
            PosthocUQError: `q` is not strictly between 0 and 1, or the likelihood draws no targets.
        """
        level = abs(2 * check_probability("q", q) - 1)
        return self._intervals((level,), _MIN_OBSERVATIONS)[level][int(q > 0.5)]

    def probability(self, value: Tensor | float) -> Tensor:
        """Shaped like the outputs: the probability of a value of each output, as of a count; a density where targets
        are continuous. The mean over the draws.

        Args:
            value: one for all outputs, or a tensor that broadcasts to ``(batch, ...)``.

        Raises:
            PosthocUQError: the likelihood has no density of single outputs.
        """
        return self._mean_over_draws(lambda *pair: self.likelihood.log_terms(*pair).exp(), value)

    def cdf(self, value: Tensor | float) -> Tensor:
        """Shaped like the outputs: the probability that each is at most `value`; as `probability`.

        Raises:
            PosthocUQError: the likelihood has no distribution function.
        """
        return self._mean_over_draws(self.likelihood.cdf, value)

    def _first_value(self, probability: Tensor) -> Tensor:
        """Shaped like the outputs: the smallest value at which `cdf` reaches a probability, by bisection; infinite
        where it does not, or everywhere does, within the numbers that are searched.
        """
        high = torch.ones_like(self.functional_mean)
        low = -high
        for _ in range(_DOUBLINGS):
            below, above = self.cdf(low) >= probability, self.cdf(high) < probability
            if not bool((below | above).any()):
                break
            low, high = torch.where(below, 2 * low, low), torch.where(above, 2 * high, high)
        below, above = self.cdf(low) >= probability, self.cdf(high) < probability
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            reached = self.cdf(middle) >= probability
            low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        whole = high.round()
        value = torch.where((whole >= low) & (whole <= high), whole, high)  # of counts, whose steps are there
        return value.masked_fill(below, -math.inf).masked_fill(above, math.inf)

    def _mean_over_draws(self, function: Callable[..., Tensor], value: Tensor | float) -> Tensor:
        outputs = self.outputs.transpose(0, 1)
        values = torch.as_tensor(value, device=outputs.device).to(outputs.dtype).expand(outputs.shape[1:])
        return by_draw(function, outputs, values).mean(0)

    def _intervals(self, levels: Sequence[float], targets: int) -> dict[float, tuple[Tensor, Tensor]]:
        """The bounds by level, all from the same drawn targets, at least so many an input."""
        draws, device = self.outputs.shape[1], self.outputs.device
        rounds = -(-targets // draws)
        keys = mix(torch.arange(1, draws + 1, device=device)).unsqueeze(1)
        rows = max(1, _MAX_NUMBERS // (rounds * draws * max(1, math.prod(self.outputs.shape[2:]))))
        shares = [share for level in levels for share in ((1 - level) / 2, (1 + level) / 2)]
        index = torch.tensor(
            [max(0, math.ceil(share * rounds * draws) - 1) for share in shares], device=device
        )
        parts = [self.picked(slice(start, start + rows)) for start in range(0, max(1, len(self)), rows)]
        quantiles = [
            part._observations(keys.expand(-1, len(part)), rounds).to(part.outputs).sort(0).values[index]
            for part in parts
        ]
        bounds = torch.cat(quantiles, 1).unbind()
        return {level: (bounds[2 * i], bounds[2 * i + 1]) for i, level in enumerate(levels)}

    def fitting(self, targets: Tensor) -> Tensor:
        """The targets as they are, once the likelihood has checked them."""
        targets = as_targets(targets)
        self.likelihood.check(self.functional_mean, targets)
        return targets

    def target_scores(self, targets: Tensor, sets: SetScore, keys: Tensor) -> TargetScores | None:
        """See `Prediction`: distances of the distribution function from 1/2; None where the likelihood has none."""
        if not self.likelihood.defines("cdf"):
            return None
        values = targets.reshape(self.functional_mean.shape)
        there = self.there(values)
        found = self.cdf(values if there is None else self.likelihood.in_support(values))
        return TargetScores.of_values("cdf", (as_double(found) - 0.5).abs(), there)

    def scores(self) -> dict[str, Tensor]:
        """See `Prediction`: the scores of values that are known."""
        scores: dict[str, Tensor] = {}
        if self.noise_variance is not None:
            scores["standard_deviation"] = by_input(self.standard_deviation)
        scores["epistemic_variance"] = by_input(self.epistemic_variance)
        return scores | ({} if self.novelty_ratio is None else {"novelty": self.novelty_ratio})

    def quality(self, targets: Tensor, bins: int = 15) -> dict[str, float]:
        """NLL; RMSE where the mean is known; coverage and sharpness of intervals where targets can be drawn. More than
        2,000 inputs have intervals from fewer drawn targets each, at least 250.
        """
        measures: dict[str, float] = {}
        values = self._like_mean(targets)
        if values is not None:
            mean = cast(Tensor, self.mean)
            if (there := self.there(values)) is not None:
                mean, values = mean[there], values[there]
            measures |= {"rmse": metrics.rmse(mean, values), **self.likelihood.measures(mean, values)}
        measures["nll"] = -float(as_double(self.log_prob(targets)).mean())
        if self.likelihood.defines("draw"):
            drawn = min(_MIN_OBSERVATIONS, max(_MIN_COUNTED, _MAX_COUNTED // max(1, len(self))))
            bounds = self._intervals(LEVELS, drawn)
            shape = bounds[LEVELS[0]][0].shape
            if shape.numel() == targets.numel():
                values = as_double(targets.reshape(shape))
                if (there := self.there(values)) is not None:
                    values = values[there]
                    bounds = {level: (low[there], high[there]) for level, (low, high) in bounds.items()}
                measures |= interval_quality(bounds.__getitem__, values)
        return measures

    def _like_mean(self, targets: Tensor) -> Tensor | None:
        """Targets in the shape of the mean, where there is one and they fit it."""
        if self.mean is None or targets.numel() != self.mean.numel():
            return None
        return as_double(targets.reshape(self.mean.shape))

    def losses(self, targets: Tensor) -> Tensor:
        """(batch,): the squared error, mean over outputs; without a mean the negative log-likelihood."""
        values = self._like_mean(targets)
        if values is None:
            return -as_double(self.log_prob(targets))
        errors = as_double(cast(Tensor, self.mean)) - values
        return self.mean_of_there(errors.square(), values)

    @property
    def loss_name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What `losses` are."""
        return "nll" if self.mean is None else "rmse"

    def retained_quality(self, scores: Tensor, targets: Tensor, rates: Sequence[float]) -> dict[str, float]:
        """Root mean squared errors; without a mean of the targets' shape negative log-likelihoods."""
        fits = self.mean is None or self._like_mean(targets) is not None
        found = self if fits else replace(self, mean=None)
        return super(DrawnPrediction, found).retained_quality(scores, targets, rates)

    @classmethod
    def mixed(cls, predictions: Sequence[Any]) -> Any:
        """See `Prediction`: the draws of all networks, of which those with fewer have each of theirs several times."""
        common = math.lcm(*(p.outputs.shape[1] for p in predictions))
        draws = [p.outputs.repeat_interleave(common // p.outputs.shape[1], 1) for p in predictions]
        means, variances = (
            [p.functional_mean for p in predictions],
            [p.epistemic_variance for p in predictions],
        )
        mean = noise = None
        if predictions[0].mean is None:
            functional_mean, epistemic = moments_of_mixture(means, variances)
        else:
            functional_mean = mean_of(means)
            mean, epistemic = moments_of_mixture([p.mean for p in predictions], variances)
        if predictions[0].noise_variance is not None:
            noise = mean_of([p.noise_variance for p in predictions])
        return cls(torch.cat(draws, 1), predictions[0].likelihood, functional_mean, epistemic, mean, noise)

    def tensors(self) -> ValueTensors:
        """See `Prediction`.

        Raises:
            PosthocUQError: the likelihood has no ``mean`` or no ``variance``.
        """
        variance = self.variance
        novelty = self._novelty_like(variance.reshape(variance.shape[0], -1)[:, 0])
        return ValueTensors(cast(Tensor, self.mean), variance, self.epistemic_variance, novelty)
