"""The search for hyperparameters on held-out data, through a head."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil, floor, log10
from typing import Any, cast

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from tqdm.auto import tqdm

from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.heads.prediction import RegressionPrediction, predict
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.sampling import SamplingPredictor
from posthoc_uq.inference.evidence import Trials, maximise_evidence, search_decades, warn_edges
from posthoc_uq.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from posthoc_uq.loaders import BatchReader, batches, check_reusable
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import model_device, replicate

_INDIFFERENT = 1e-6  # nats: a smaller gain does not move a hyperparameter
_HYPERPARAMETERS = ("scale", "prior_precision", "residual_weight", "noise_scale", "temperature")


@contextmanager
def restored_on_error(posterior: Posterior) -> Generator[None]:
    """Give the hyperparameters, and the record of how they were found, back if the search fails."""
    before = {name: getattr(posterior, name) for name in _HYPERPARAMETERS}
    record = posterior.record
    tuning, calibration = dict(record.tuning), dict(record.calibration)
    try:
        yield
    except BaseException:
        for name, value in before.items():
            setattr(posterior, name, value)
        record.tuning, record.calibration = tuning, calibration
        raise


def device_of(posterior: Posterior) -> torch.device:
    """Where the posterior's model is."""
    return model_device(model_of(posterior))


def model_of(posterior: Posterior) -> nn.Module:
    """The model of a posterior.

    Raises:
        PosthocUQError: it has none.
    """
    if posterior.model is None:
        raise PosthocUQError(
            "The posterior has lost its model; set posterior.model to the model it was fitted on."
        )
    return posterior.model


class HeldOutSearch:
    """Coordinate search on held-out data; every evaluation draws with the same seed."""

    def __init__(
        self,
        posterior: Posterior,
        loader: Iterable[Any],
        make: Callable[[], Predictor],
        seed: int,
        reader: BatchReader,
        progress: bool,
    ) -> None:
        check_reusable(loader, 2)
        self.posterior = posterior
        self.trials = Trials()
        self._bar = tqdm(disable=not progress, desc="tuning", unit=" evaluations", leave=False)
        self._loader = loader
        self._make = make
        self._seed = seed
        self._reader = reader

    def _batches(self) -> Iterator[tuple[Any, Tensor]]:
        with isolated_random_state(self._seed):
            for batch in batches(self._loader, self._reader):
                if batch.targets is None:
                    raise PosthocUQError(
                        "Tuning on held-out data needs targets; val_loader yields inputs alone."
                    )
                yield batch, batch.targets

    def loss(self) -> float:
        """Mean negative log-likelihood of the held-out data, in nats, at the present hyperparameters."""
        predictor, total, count = self._make(), 0.0, 0
        with torch.no_grad():
            for batch, targets in self._batches():
                prediction = predictor(*batch.args, **batch.kwargs)
                regression = isinstance(prediction, RegressionPrediction)
                mean = prediction.mean if regression else prediction.logits_mean
                self.posterior.likelihood.check(mean, targets)
                shaped = targets.reshape(mean.shape) if regression else targets.flatten().long()
                total -= float(prediction.log_prob(shaped).double().sum())
                count += len(prediction)
        return total / count

    def _evaluate(self) -> float:
        posterior = self.posterior
        try:
            value = self.loss()
        except NonFiniteError:  # a draw of wild weights: a value no search keeps
            value = float("inf")
        value = value if value == value else float("inf")
        self._bar.update()
        prior = posterior.prior_precision
        self.trials.trials.append(
            {
                "prior precision": dict(prior) if isinstance(prior, dict) else prior,
                "residual weight": posterior.residual_weight,
                "scale": posterior.scale,
                "noise scale": posterior.noise_scale,
                "temperature": posterior.temperature,
                "validation NLL": value,
            }
        )
        return value

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self.posterior, name) for name in _HYPERPARAMETERS}

    def _apply(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self.posterior, name, value)

    @staticmethod
    def check_grid(names: list[str], grid: Sequence[float]) -> None:
        """Refuse a grid that is none, or that nothing is searched over."""
        if "prior_precision" not in names:
            raise PosthocUQError(f"prior_precisions are given, and parameters={names} leave them alone.")
        if len(grid) == 0 or any(not 0 < value < float("inf") for value in grid):
            raise PosthocUQError(f"prior_precisions must be positive and finite, not {list(grid)}.")

    def coordinates(
        self, names: list[str], max_evaluations: int, grid: Sequence[float] | None = None
    ) -> Trials:
        """One hyperparameter after the other, from the present ones; the best values tried are kept."""
        best_loss, best = self._evaluate(), self._values()
        for name in names:
            self._apply(best)
            kept = [(best_loss, best)]

            def objective(
                x: float, name: str = name, base: dict[str, Any] = best, kept: list[tuple[float, Any]] = kept
            ) -> float:
                self._apply(base)
                self._set(name, x, base)
                value = self._evaluate()
                kept.append((value, self._values()))
                return value

            if name == "residual_weight":  # [0, 1] is its whole domain: an end of it is no edge of a search
                minimize_scalar(
                    objective,
                    bounds=(0.0, 1.0),
                    method="bounded",
                    options={"xatol": 0.03, "maxiter": max_evaluations},
                )
                objective(0.0)
                objective(1.0)
                edge = False
            elif name == "prior_precision":
                edge = self._search_prior(objective, best, max_evaluations, grid)
            else:
                _, edge = search_decades(objective, (-2.0, 2.0), (-5.0, 5.0), 0.05, max_evaluations)
            improved = min(kept, key=lambda pair: pair[0])
            if improved[0] < best_loss - _INDIFFERENT:
                best_loss, best = improved
                if edge:
                    self.trials.at_edge.append(f"{name.replace('_', ' ')} = {_shown(best, name)}")
            self.posterior.record.tuning[name.replace("_", " ")] = "validation NLL"
        self._apply(best)
        self._bar.close()
        warn_edges(self.trials)
        self._compare_with_the_model_alone(best_loss)
        return self.trials

    def _compare_with_the_model_alone(self, loss: float) -> None:
        """Warn where even the best hyperparameters predict held-out data worse than the model without a posterior."""
        twin, total, count = replicate(model_of(self.posterior)), 0.0, 0
        with torch.no_grad():
            for batch, targets in self._batches():
                outputs = batch.call(twin) / self.posterior.temperature
                total -= float(self._plain_likelihood().log_prob(outputs, targets).sum())
                count += outputs.shape[0]
        self.trials.model_alone = total / count
        if loss > total / count + 0.02:
            advice = (
                "Train longer, with a smaller prior_precision, or with train_mean=False."
                if self.posterior.centre
                else "Restrict the posterior (layers='last') or give it more data."
            )
            warnings.warn(
                f"The best validation NLL found, {loss:.4g}, is worse than the model's own, {total / count:.4g}: the "
                f"drawn weights do not serve this model. {advice}",
                UserWarning,
                stacklevel=4,
            )

    def _plain_likelihood(self) -> Likelihood:
        """The posterior's likelihood at its present noise."""
        noise = self.posterior.noise_variance
        return self.posterior.likelihood if noise is None else Gaussian(noise)

    def _search_prior(
        self,
        objective: Callable[[float], float],
        base: dict[str, Any],
        max_evaluations: int,
        given: Sequence[float] | None,
    ) -> bool:
        """Every decade from below the evidence to well above the weights' own precision, then the best one finely;
        or what was given.

        Where drawn weights are noise the loss is flat, so a local search from the evidence would stay there.
        """
        prior, means = base["prior_precision"], list(self.posterior.mean.values())
        squares = sum(float(m.detach().square().sum()) for m in means) / sum(m.numel() for m in means)
        own = -log10(max(squares, 1e-30))
        if isinstance(prior, dict):  # per layer: a common factor
            values = cast(dict[str, float], prior).values()
            shift = sum(log10(v) for v in values) / len(values)
        else:
            shift = 0.0
        if given is not None:
            found = [objective(10.0 ** (log10(value) - shift)) for value in given]
            best_given = given[found.index(min(found))]
            return len(given) > 1 and best_given in (min(given), max(given))
        centre = shift if isinstance(prior, dict) else log10(prior)
        low, high = floor(min(centre - 2, own - 2)), ceil(max(centre + 2, own + 4))
        grid = [float(decade) for decade in range(low, high + 1)]
        losses = [objective(10.0 ** (decade - shift)) for decade in grid]
        while losses[-1] < min(losses[:-1]) - _INDIFFERENT and grid[-1] < high + 4:
            grid.append(grid[-1] + 1)
            losses.append(objective(10.0 ** (grid[-1] - shift)))
        best = grid[losses.index(min(losses))]
        minimize_scalar(
            lambda x: objective(10.0 ** (x - shift)),
            bounds=(best - 1, best + 1),
            method="bounded",
            options={"xatol": 0.05, "maxiter": max_evaluations},
        )
        return best in (grid[0], grid[-1])

    def _set(self, name: str, x: float, base: dict[str, Any]) -> None:
        if name == "prior_precision":
            prior = base["prior_precision"]
            self.posterior.prior_precision = (
                {k: v * x for k, v in prior.items()} if isinstance(prior, dict) else x
            )
        elif name == "scale":
            self.posterior.scale = base["scale"] * x
        elif name == "noise":
            self.posterior.noise_scale = base["noise_scale"] * x
        else:
            self.posterior.residual_weight = min(1.0, max(0.0, x))

    def temperature(self) -> Trials:
        """The temperature on the logits, at the prior precision of the evidence; one set of draws serves all."""
        posterior = self.posterior
        if not isinstance(posterior.likelihood, (Categorical, Bernoulli)):
            raise PosthocUQError(
                f"A temperature divides logits; likelihood {posterior.likelihood.name!r} has none."
            )
        if posterior.takes_prior and posterior.record.tuning.get("prior precision") != "given":
            self.trials = maximise_evidence(posterior, per_layer=isinstance(posterior.prior_precision, dict))
        posterior.temperature = 1.0
        predictor = self._make()
        objective = (
            self._of_draws(predictor) if isinstance(predictor, SamplingPredictor) else self._at_temperature
        )
        found, edge = search_decades(objective, (-1.0, 1.5), (-3.0, 4.0), 0.005, 40)
        posterior.temperature = found
        posterior.record.tuning["temperature"] = "validation NLL"
        if edge:
            self.trials.at_edge.append(f"temperature = {found:.3g}")
            warn_edges(self.trials)
        return self.trials

    def _at_temperature(self, temperature: float) -> float:
        self.posterior.temperature = temperature
        return self._evaluate()

    def _of_draws(self, predictor: SamplingPredictor) -> Callable[[float], float]:
        """The loss by temperature, from outputs that were computed once."""
        posterior = self.posterior
        logits: list[Tensor] = []
        targets: list[Tensor] = []
        with torch.no_grad():
            for batch, labels in self._batches():
                outputs = predictor.outputs(*batch.args, **batch.kwargs)
                posterior.likelihood.check(outputs[0], labels)
                logits.append(outputs.cpu())
                targets.append(labels.cpu().flatten().long())
        stacked, labels = torch.cat(logits, dim=1), torch.cat(targets)

        def objective(temperature: float) -> float:
            value = -float(predict(stacked / temperature, posterior).log_prob(labels).double().mean())
            self.trials.trials.append({"temperature": temperature, "validation NLL": value})
            return value

        return objective  # `predict` leaves the temperature to whoever makes the outputs


def _shown(values: dict[str, Any], name: str) -> str:
    value = values["noise_scale" if name == "noise" else name]
    return "per layer" if isinstance(value, dict) else f"{value:.3g}"
