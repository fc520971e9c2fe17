"""Blocks from outside of the package: registered, drawn from, kept in files, and refused where they cannot serve."""

import importlib
import sys
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from networks import registries_restored
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import CorruptPosteriorError, Posterior, PosthocUQError
from posthoc_uq.layers import describe
from posthoc_uq.likelihoods import Categorical
from posthoc_uq.methods import METHODS
from posthoc_uq.posteriors import (
    BLOCKS,
    DRAWS,
    FAMILIES,
    INDEPENDENT,
    LOG_DETERMINANT,
    PRECISION,
    QUADRATIC,
    ROWS,
    SYMMETRY,
    VARIANCES,
    Block,
    Covariance,
    DiagonalBlock,
    Evidence,
    HeadRecord,
    PrecisionSettings,
)
from posthoc_uq.posteriors.covariance import DiagonalPrecision

SPIKE = "spike_slab"


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def posterior_with(model: nn.Module, method: str, made: Mapping[str, Block]) -> Posterior:
    mean = {name: parameter.detach() for name, parameter in model.named_parameters()}
    layers = {
        name: describe(
            name,
            "linear",
            (f"{name}.weight", mean[f"{name}.weight"]),
            (f"{name}.bias", mean[f"{name}.bias"]),
            1,
        )
        for name in made
    }
    members = {name: [name] for name in made}
    return Posterior(method, layers, made, members, mean, Categorical(), Evidence(20, -5.0), model=model)


def spike_block() -> type[Block]:
    """The class of blocks of ``drawn_method.py``, defined anew and registered."""
    sys.modules.pop("drawn_method", None)
    return importlib.import_module("drawn_method").SpikeBlock


@pytest.fixture
def spikes() -> Generator[tuple[nn.Module, Posterior]]:
    with registries_restored():
        kind, model, generator = spike_block(), network(), torch.Generator().manual_seed(1)
        made: dict[str, Block] = {}
        for name, shape in (("0", (1, 4, 4)), ("2", (1, 3, 5))):
            numbers = torch.rand(3, *shape, generator=generator)
            made[name] = kind(2 * numbers[0] - 1, 0.3 * numbers[1], numbers[2])  # type: ignore[call-arg]
        yield model, posterior_with(model, SPIKE, made)
    assert SPIKE not in BLOCKS


def test_draws_that_are_no_gaussian_have_their_moments(spikes: tuple[nn.Module, Posterior]) -> None:
    model, posterior = spikes
    assert posterior.capabilities == {DRAWS}
    draws = posterior.sample(8000, torch.Generator().manual_seed(2))
    for name, layer in posterior.layers.items():
        block: Any = posterior.blocks[name]
        weight = draws[layer.weight]
        mean, variances, share = (
            layer.to_parameters(tensor)[layer.weight]
            for tensor in (block.mean, block.variances, block.inclusion)
        )
        expected = share * mean
        second = share * (variances + mean.square())
        spread = (second - expected.square()).sqrt()
        assert bool(((weight.mean(0) - expected).abs() < 5 * spread / 8000**0.5 + 1e-6).all())
        zeros = (weight == 0).float().mean(0)
        assert bool(((zeros - (1 - share)).abs() < 5 * (share * (1 - share) / 8000).sqrt() + 1e-6).all())
        torch.testing.assert_close(weight.square().mean(0), second, rtol=0.2, atol=0.02)
    # a draw depends on its seed alone
    seeds = posterior.draw_seeds(5, torch.Generator().manual_seed(3))
    many, alone = posterior.sample_from(seeds), posterior.sample_from([seeds[3]])
    assert all(torch.equal(many[name][3], alone[name][0]) for name in many)
    assert dict(model.named_parameters()).keys() == many.keys()


def test_a_block_that_draws_predicts_and_is_kept(spikes: tuple[nn.Module, Posterior], tmp_path: Path) -> None:
    model, posterior = spikes
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(4))
    predictor = uq.wrap(model, posterior)
    assert predictor.head == "sampling"
    drawn = posterior.sample(30, torch.Generator().manual_seed(0))
    with torch.no_grad():
        outputs = torch.stack(
            [
                torch.func.functional_call(model, {name: own[i] for name, own in drawn.items()}, (x,))
                for i in range(30)
            ]
        )
    torch.testing.assert_close(predictor(x).probs, outputs.softmax(-1).mean(0))
    report = posterior.report()
    assert "included" in str(report) and SPIKE in str(report)
    path = tmp_path / "p.h5"
    for dtype in (None, torch.bfloat16):
        uq.save(posterior, path, dtype=dtype)
        for untrusted in (False, True):
            loaded = uq.load(path, model, untrusted=untrusted)
            if dtype is None:
                again = uq.wrap(model, loaded)
                assert torch.equal(again(x).probs, predictor(x).probs)
    found = uq.inspect(path)
    assert found["blocks"]["0"]["kind"] == SPIKE
    assert SPIKE in str(found)


def test_a_file_is_checked_by_what_its_block_declares(
    spikes: tuple[nn.Module, Posterior], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, posterior = spikes
    path = tmp_path / "p.h5"
    uq.save(posterior, path)
    block: Any = posterior.blocks["0"]
    for tensor, value, words in (
        ("inclusion", 1.5, "'inclusion' .*numbers beyond 1"),
        ("variances", -0.1, "'variances' .*negative numbers"),
        ("mean", float("nan"), "'mean' .*NaN"),
    ):
        kept = getattr(block, tensor)[0, 0, 0].item()
        getattr(block, tensor)[0, 0, 0] = value
        with pytest.raises(PosthocUQError, match=words):
            uq.save(posterior, tmp_path / "q.h5")
        getattr(block, tensor)[0, 0, 0] = kept
    del BLOCKS[SPIKE]
    with pytest.raises(CorruptPosteriorError, match=f"blocks of the kind '{SPIKE}', .* import the module"):
        uq.load(path, model)
    with pytest.raises(CorruptPosteriorError, match=f"kind must be one of .*not '{SPIKE}'"):
        uq.inspect(path)
    monkeypatch.delitem(FAMILIES, SPIKE)
    for read in (lambda: uq.load(path, model), lambda: uq.inspect(path)):
        with pytest.raises(CorruptPosteriorError, match=f"a method that is not registered.*'{SPIKE}'"):
            read()


def test_what_a_posterior_cannot_do_is_refused_in_one_sentence(spikes: tuple[nn.Module, Posterior]) -> None:
    model, posterior = spikes
    end = f"which the blocks of method='{SPIKE}' do not have"
    for head, needs in (("linearized", "quadratic forms"), ("moments", "variances")):
        with pytest.raises(
            PosthocUQError, match=rf"^head='{head}' needs {needs}, {end}; head='sampling' does not\.$"
        ):
            uq.wrap(model, posterior, head=head)
    posterior = posterior.noted(head=HeadRecord(name="linearized", options={}, criterion="given"))
    assert uq.wrap(model, posterior).head == "sampling"  # the default is one that it can serve
    for work, words in (
        (
            lambda: uq.tune(posterior),
            f"log marginal likelihood needs a log-determinant, {end}; tune on held-out",
        ),
        (posterior.log_marginal_likelihood, f"log marginal likelihood needs a log-determinant, {end}"),
        (posterior.log_determinant, f"needs a log-determinant, {end}"),
        (posterior.variance, f"needs variances, {end}"),
        (lambda: posterior.of_layer("0"), f"needs row covariances, {end}"),
        (lambda: posterior.quadratic({"0": torch.zeros(1, 1, 4, 4)}), f"needs quadratic forms, {end}"),
        (lambda: uq.wrap(model, posterior, antithetic=True), f"antithetic=True needs symmetric draws, {end}"),
        (lambda: posterior.sample_from([1], signs=[-1]), f"needs symmetric draws, {end}"),
        (
            lambda: uq.wrap(model, posterior).novelty(torch.zeros(2, 3), of="top"),
            f"Novelty of='top' needs quadratic forms, {end}",
        ),
    ):
        with pytest.raises(PosthocUQError, match=words):
            work()


def test_what_cannot_be_tuned_is_said_and_the_rest_is_tuned(spikes: tuple[nn.Module, Posterior]) -> None:
    model, posterior = spikes
    assert (
        posterior.tunable == {"temperature", "class_shift", "class_scale"}
        and posterior.width_parameter is None
    )
    shown = posterior.report().summary
    assert "temperature" in shown and not {"scale", "prior precision", "residual weight"} & shown.keys()
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(5))
    loader = [(x, model(x).argmax(1).detach())]
    for options, words in (
        ({"criterion": "faithful"}, "neither a prior precision nor a scale.*by criterion='likelihood'"),
        ({"parameters": ("scale",)}, r"must be left out for this posterior; not \['scale'\]"),
        ({"temperature": False}, "nothing to tune.*neither.*temperature=False leaves the temperature"),
    ):
        with pytest.raises(PosthocUQError, match=words):
            uq.tune(posterior, loader, progress=False, **options)
    for name, words in (
        ("scale", "its draws follow no scale"),
        ("prior_precision", "no prior enters its weights"),
    ):
        with pytest.raises(PosthocUQError, match=words):
            posterior.with_settings(**{name: 2.0})
    posterior = posterior.noted(head=HeadRecord(name="linearized", options={}, criterion="given"))
    with pytest.warns(UserWarning, match="worse than the model's own"):
        posterior = uq.tune(
            posterior, loader, parameters=(), scaling="temperature", n_samples=4, progress=False
        )
    assert posterior.temperature != 1.0 and posterior.history.head.name == "sampling"


def test_built_in_blocks_say_what_they_can_do() -> None:
    gaussian = {DRAWS, SYMMETRY, VARIANCES, QUADRATIC, ROWS, LOG_DETERMINANT, PRECISION}
    for kind in ("diagonal", "kfac", "efb", "inf", "dense", "mean_field"):
        more = {INDEPENDENT} if kind in ("diagonal", "mean_field") else set()
        assert BLOCKS[kind].capabilities() == gaussian | more
    assert {kind for kinds in FAMILIES.values() for kind in kinds} == BLOCKS.keys()


def test_a_class_may_be_defined_once_more() -> None:
    before = dict(BLOCKS)
    with registries_restored():
        first = spike_block()
        assert BLOCKS[SPIKE] is first
        del METHODS[SPIKE]
        again = spike_block()  # the same definition once more, as a cell of a notebook that runs again
        assert BLOCKS[SPIKE] is again
    assert before == BLOCKS


class _Hidden(Covariance):
    """A Gaussian that is known by its draws, variances and quadratic forms alone."""

    def __init__(self, own: DiagonalPrecision) -> None:
        self._own = own

    def transform(self, noise: Tensor) -> Tensor:
        return self._own.transform(noise)

    def variance(self) -> Tensor:
        return self._own.variance()

    def quadratic(self, jacobians: Tensor) -> Tensor:
        return self._own.quadratic(jacobians)


class _HiddenBlock(DiagonalBlock):
    makes: ClassVar[type[Covariance]] = _Hidden

    def covariance(self, settings: PrecisionSettings) -> Any:
        return _Hidden(super().covariance(settings))


@pytest.mark.parametrize("names", [("0", "2"), ("2",)])
def test_quadratic_forms_alone_serve_the_linearised_head(names: tuple[str, ...]) -> None:
    """As the same posterior with all that it could say; of a last layer alone by the closed form."""
    model, generator = network(), torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, generator=generator)
    numbers = {n: torch.rand(1, *{"0": (4, 4), "2": (3, 5)}[n], generator=generator) for n in names}
    whole = posterior_with(model, "diag", {n: DiagonalBlock(d) for n, d in numbers.items()})
    hidden = posterior_with(model, "diag", {n: _HiddenBlock(d) for n, d in numbers.items()})
    assert hidden.capabilities == {DRAWS, SYMMETRY, VARIANCES, QUADRATIC}
    for options in ({"head": "linearized"}, {"head": "linearized", "engine": "exact"}):
        own, other = (uq.wrap(model, posterior, **options) for posterior in (whole, hidden))
        for one, two in (
            (own(x).probs, other(x).probs),
            (own.functional_variance(x), other.functional_variance(x)),  # type: ignore[union-attr]
            (own.functional_covariance(x, joint=True), other.functional_covariance(x, joint=True)),  # type: ignore[union-attr]
            (own.novelty(x, of="all"), other.novelty(x, of="all")),
        ):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    uq.wrap(model, hidden, head="moments")  # which goes without rows where it is not told to take them
    with pytest.raises(PosthocUQError, match="needs row covariances"):
        uq.wrap(model, hidden, head="moments", weights="row")
    with pytest.raises(PosthocUQError, match="needs a log-determinant"):
        uq.tune(hidden)
    assert BLOCKS["diagonal"] is DiagonalBlock


def test_who_tells_novelty_is_a_plain_value(tmp_path: Path) -> None:
    """Not the words that a report has for it."""
    model, x = network(), torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    posterior = posterior_with(model, "diag", {"2": DiagonalBlock(torch.rand(1, 3, 5))})
    predictor = uq.wrap(model, posterior)
    with pytest.raises(PosthocUQError, match="no statistics of the last layer"):
        predictor.novelty(x)
    posterior = posterior.noted(fit={"novelty": "in other words"})
    predictor = uq.wrap(model, posterior)
    with pytest.raises(PosthocUQError, match="no statistics of the last layer"):
        predictor.novelty(x)
    posterior = posterior.replaced(history=replace(posterior.history, novelty="posterior"))
    predictor = uq.wrap(model, posterior)
    expected = predictor.novelty(x, of="top")
    assert torch.equal(predictor.novelty(x), expected)
    uq.save(posterior, tmp_path / "p.h5")
    assert uq.load(tmp_path / "p.h5", model).history.novelty == "posterior"
