"""The sampling head: the Monte Carlo estimate ``p(y | x) = 1/S sum_s p(y | x, w_s)`` with draws of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.ensemble import Batched, Ensemble, Keep
from posthoc_uq.heads.fixed_part import FixedPart
from posthoc_uq.heads.interception import ReplayError
from posthoc_uq.heads.output_draws import OutputDraws
from posthoc_uq.heads.prediction import divisor_of, summarise
from posthoc_uq.heads.predictor import Predictor, same_centre
from posthoc_uq.heads.replay import Features
from posthoc_uq.layers import Call
from posthoc_uq.loaders import Batch
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.capabilities import INDEPENDENT, SYMMETRY
from posthoc_uq.posteriors.settings import ABOUT
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.predictions.samples import at_least_float32
from posthoc_uq.replica import model_dtype
from posthoc_uq.values import COUNT, SEED, flag, one_of, shown

Drawn = Literal["weights", "outputs"]

DTYPES = (None, torch.float16, torch.bfloat16, torch.float32)


class SamplingPredictor(Predictor):
    """Predicts with `n_samples` draws of the weights.

    The draws are those of `Posterior.sample`, made at construction with the posterior's settings of that moment;
    later changes of its prior precision have no effect until `redraw`. Temperature and noise variance are read
    at every prediction. Where the posterior's weights enter the model late, as those of a last layer do, the part
    before them runs once for a batch. A prediction is summed up while the draws run, and takes the memory of a few
    draws' outputs, however many draws there are.

    Args:
        model: the model the posterior was fitted on.
        posterior: of any method.
        n_samples: draws of the weights.
        seed: of the draws; the same seed gives the same ensemble. None draws anew each time.
        generator: in place of a seed.
        keep: ``"weights"`` keeps every draw: `n_samples` times the memory of the weights that have a posterior.
            ``"seeds"`` draws them again at every prediction, into one model (a few small ones are drawn together): the
            same numbers, bit for bit, and the memory of the posterior's factors (about one set of weights) and one
            model, for the time of
            drawing: some 10 ns per weight and draw on a CPU, ten times that with ``method="kfac"`` or ``"efb"``,
            whose draws are products with the full eigenbases. Under autograd the graph holds all draws either way.
        antithetic: draw in pairs ``mean + d, mean - d`` with the same deviation; of an odd number the last draw has
            no partner. Halves the drawing, and terms odd in the deviation cancel in the predictive mean; the
            variance over the draws is that of half as many independent ones, and for a nearly linear model
            ``S / (S - 1)`` times too large on average.
        dtype: ``torch.float16``, ``torch.bfloat16`` or ``torch.float32``: what all weights of the ensemble are
            rounded to, and the inputs cast to; outputs come back in float32. None runs in the model's own.
        batched: run many draws in one pass with `torch.func.vmap`: True, False, or ``"auto"`` where that is
            expected to be faster (small models on small batches; the rule is in `posthoc_uq.heads.ensemble`). A model
            that cannot be run like that is run draw by draw; `repr` says so, and why.
        novelty: whether predictions know their novelty, if the posterior does: one forward pass beside those of the
            draws, or next to nothing where the part before the weights with a posterior runs once anyway.
        drawn: ``"weights"``, or ``"outputs"`` for those of every layer with a posterior, from the mean and the variance
            that independent weights give them, by two products in place of one: local reparametrisation (Kingma,
            Salimans, Welling 2015), as trainings of latent binary networks draw. Every sample and position then has
            noise of its own, in place of weights that all have in common. Mean and variance of a layer's outputs are
            exact; that they are Gaussian, and that positions of a convolution are independent, is not. The options of
            drawn weights (`keep`, `antithetic`, `dtype`, `batched`) do not go with it.

    Raises:
        PosthocUQError: no draws, or an option with another value than those listed.
    """

    ensemble: Ensemble | OutputDraws

    head = "sampling"

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        n_samples: int = 30,
        seed: int | None = 0,
        generator: torch.Generator | None = None,
        *,
        keep: Keep = "weights",
        antithetic: bool = False,
        dtype: torch.dtype | None = None,
        batched: Batched = "auto",
        novelty: bool = True,
        drawn: Drawn = "weights",
    ) -> None:
        super().__init__(model, posterior)
        self._tells_novelty = flag("novelty", novelty)
        if antithetic:
            posterior.require([SYMMETRY], "antithetic=True", "leave it out")
        one_of("keep", keep, ("weights", "seeds"))
        if not (dtype is None or isinstance(cast(Any, dtype), torch.dtype)) or dtype not in DTYPES:
            raise PosthocUQError(f"dtype must be one of {DTYPES}, not {shown(dtype)}.")
        if not isinstance(batched, (bool, str)) or batched not in (True, False, "auto"):
            raise PosthocUQError(f"batched must be True, False or 'auto', not {shown(batched)}.")
        if one_of("drawn", drawn, get_args(Drawn)) == "outputs":
            posterior.require([INDEPENDENT], "drawn='outputs'", "take drawn='weights'")
            _check_outputs(keep, antithetic, dtype, batched)
        self._drawn_outputs = drawn == "outputs"
        self.n_samples: int = COUNT("n_samples", n_samples)
        self._keep: Keep = keep
        self._antithetic = flag("antithetic", antithetic)
        self._dtype = dtype
        self._batched: Batched = batched
        self.redraw(seed, generator)

    def redraw(self, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        """Draw the ensemble anew, with the posterior's present settings; predictions already under way in other
        threads end with the old one.

        Args:
            seed: of the draws; None draws differently every time.
            generator: in place of a seed.
        """
        if generator is None and seed is not None:
            generator = torch.Generator().manual_seed(SEED("seed", seed))
        pairs = (self.n_samples + 1) // 2 if self._antithetic else self.n_samples
        posterior = self._snapshot()
        seeds, signs = posterior.draw_seeds(pairs, generator), None
        if self._antithetic:
            seeds = [seed for seed in seeds for _ in range(2)][: self.n_samples]
            signs = [1, -1] * pairs
        self._drawn_with, self._drawn_around = posterior.settings.plain(), posterior.centre
        if self._drawn_outputs:
            self.ensemble = OutputDraws(self._model[0], posterior, seeds)
            return
        self.ensemble = Ensemble(
            self._model[0],
            posterior,
            seeds,
            signs=None if signs is None else signs[: self.n_samples],
            keep=self._keep,
            dtype=self._dtype,
            batched=self._batched,
        )

    def _network_dtype(self) -> torch.dtype:
        """That of the drawn models, which may have been moved, but for draws in a type of their own."""
        return super()._network_dtype() if self._dtype is not None else model_dtype(self.ensemble.template)

    def identity(self) -> dict[str, Any]:
        """See `Predictor`; without the seed."""
        dtype = None if self._dtype is None else str(self._dtype).removeprefix("torch.")
        identity: dict[str, Any] = {
            "head": self.head,
            "n_samples": self.n_samples,
            "antithetic": self._antithetic,
            "dtype": dtype or "own",
        }
        return identity | ({"drawn": "outputs"} if self._drawn_outputs else {})

    def hyperparameters(self) -> dict[str, Any]:
        """See `Predictor`: those of the draws; temperature and noise variance are the posterior's present ones."""
        present = super().hyperparameters()
        return self._drawn_with | {name: present[name] for name, about in ABOUT.items() if about.of_outputs}

    def extra_repr(self) -> str:
        """How it samples, and why draws are not batched, or run the whole model, if the model refused the other."""
        refused = self.ensemble.fixed_part.refused
        whole = "" if refused is None else f", whole passes ({refused})"
        if self._drawn_outputs:
            return f"n_samples={self.n_samples}, drawn='outputs'{whole}"
        text = f"n_samples={self.n_samples}, keep={self._keep!r}, antithetic={self._antithetic}, batched="
        refused = self.ensemble.refused
        return text + (repr(self._batched) if refused is None else f"False ({refused})") + whole

    def _blocks(
        self,
        posterior: Posterior,
        batch: Batch,
        ensemble: Ensemble | OutputDraws,
        features: Features | None = None,
    ) -> Iterator[Tensor]:
        divisor = divisor_of(posterior)
        if features is not None and isinstance(ensemble, Ensemble):
            blocks = ensemble.blocks_after(features, batch.args, batch.kwargs)
        else:
            blocks = ensemble.blocks(*batch.args, **batch.kwargs)
        for block in blocks:
            block = at_least_float32(block)
            yield block if divisor == 1.0 else block / divisor

    def refresh(self, seed: int) -> None:
        """See `Predictor`."""
        self.redraw(seed)

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """The outputs of every draw, ``(n_samples, batch, ...)``, in float32 at least; logits are divided by the
        temperature.
        """
        batch = self._batch(args, kwargs)
        with self.explaining(batch):
            return torch.cat(list(self._blocks(self._snapshot(), batch, self.ensemble)))

    def _functions(self, posterior: Posterior, batch: Batch, n: int, generator: torch.Generator) -> Tensor:
        """See `DrawnFunctions`: other draws than those of its predictions."""
        seeds = posterior.draw_seeds(n, generator)
        if self._drawn_outputs:
            ensemble: Ensemble | OutputDraws = OutputDraws(self._model[0], posterior, seeds)
        else:
            ensemble = Ensemble(
                self._model[0], posterior, seeds, keep="seeds", dtype=self._dtype, batched=self._batched
            )
        ensemble.to(self.device)
        return torch.cat([at_least_float32(block) for block in ensemble.blocks(*batch.args, **batch.kwargs)])

    def _predict(self, posterior: Posterior, batch: Batch) -> Prediction:
        ensemble = self.ensemble
        recorded, calls = None, None
        if isinstance(ensemble, Ensemble):
            recorded = ensemble.recorded(*batch.args, **batch.kwargs)
            if recorded is not None:
                calls = self._last_calls(posterior, ensemble.fixed_part, recorded)
        # before the draws: a model may change its inputs in place
        ratio = self._known_novelty(posterior, batch, calls)
        return summarise(self._blocks(posterior, batch, ensemble, recorded), posterior).with_novelty(ratio)

    def _last_calls(self, posterior: Posterior, fixed: FixedPart, recorded: Features) -> list[Call] | None:
        """The calls of the last layer at the posterior's mean by what was recorded for the draws, which saves a pass
        through the part before the weights with a posterior; None where a pass of its own is needed.
        """
        grams = posterior.features
        if grams is None or not self._tells_novelty:
            return None
        if self._dtype is not None or not same_centre(self._drawn_around, posterior.centre):
            return None  # other numbers than in the fit
        try:
            with torch.inference_mode(False), torch.no_grad():
                return fixed.calls_of(grams.layer, recorded)
        except ReplayError:
            return None

    def _distribution(self, posterior: Posterior, batch: Batch) -> Tensor:
        return torch.cat([at_least_float32(b) for b in self.ensemble.blocks(*batch.args, **batch.kwargs)])

    def _prediction_of(self, posterior: Posterior, distribution: Tensor) -> Prediction:
        return summarise(iter([distribution / divisor_of(posterior)]), posterior)

    def features(self, *args: Any, **kwargs: Any) -> Features | None:
        """See `Predictor`; features do not change when the weights are drawn anew."""
        features = self.ensemble.features(*args, **kwargs)
        if features is not None and self._dtype is not None:
            features.outputs = None
        return features

    def distribution_from(self, features: Features) -> Tensor:
        """See `Predictor`."""
        return torch.cat([at_least_float32(block) for block in self.ensemble.from_features(features)])


def _check_outputs(keep: str, antithetic: bool, dtype: torch.dtype | None, batched: Batched) -> None:
    """Refuse options of drawn weights where outputs are drawn."""
    given = {"keep": keep != "weights", "antithetic": antithetic, "dtype": dtype, "batched": batched is True}
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise PosthocUQError(
            f"drawn='outputs' draws no weights, so that {wrong[0]}= says nothing; leave it out."
        )
