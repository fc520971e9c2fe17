"""The benchmarks' smoke modes: that they run, what they print, and those of their facts that are no times."""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import posthoc_uq as uq

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def _script(name: str) -> ModuleType:
    """A benchmark as a module, found beside its own helpers as when it is run as a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return __import__(name)


@pytest.fixture(scope="module")
def quality() -> tuple[ModuleType, list[dict[str, Any]]]:
    script = _script("posterior_quality")
    return script, script.smoke()


@pytest.mark.study
def test_quality_orders_the_families_in_frobenius_norm(
    quality: tuple[ModuleType, list[dict[str, Any]]],
) -> None:
    script, rows = quality
    lines = script.frobenius_table(script.summarise(rows))
    assert [line["rank"] for line in lines] == ["50", "50", "full", "full"]
    for line in lines:
        if line["rank"] == "full":
            assert line["inf rescale"] <= line["efb"] <= line["kfac"] <= line["diag"]
        assert line["inf rescale"] <= line["inf clamp"] <= line["inf none"]


@pytest.mark.study
def test_quality_measures_a_divergence(
    quality: tuple[ModuleType, list[dict[str, Any]]], tmp_path: Path
) -> None:
    script, rows = quality
    assert all(isfinite(row["kl"]) and row["kl"] > 0 for row in rows)
    summary = script.summarise(rows)
    found = {line["posterior"]: line["kl"] for line in script.means(summary)}
    weights = [found[f"inf rescale {weight:g}"] for weight in script.SHOWN_WEIGHTS]
    assert (
        found["inf rescale tuned"] <= min(weights)
        and found["inf rescale tuned"] < found["efb"] < found["diag"]
    )
    script.picture(summary).savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.study
def test_quality_is_exact_at_its_reference(quality: tuple[ModuleType, list[dict[str, Any]]]) -> None:
    script, _ = quality
    with script.single_threaded():
        net = script.boston_regressor(0)
        exact = script.exact_blocks(net)
        efb = script.fitted_blocks(net, "efb")
        diagonal = script.fitted_blocks(net, "diag")
    output = net.layers[-1]  # one output: the Fisher is a Kronecker product, and EFB gives it
    assert float((efb[output].dense()[0] - exact[output]).norm() / exact[output].norm()) < 1e-10
    for layer, fisher in exact.items():
        error = (diagonal[layer].dense()[0].diagonal() - fisher.diagonal()).norm() / fisher.diagonal().norm()
        assert float(error) < 1e-10
    posterior = script.Exact(exact[output], len(net.inputs), 10.0)
    assert max(posterior.divergences(exact[output])) < 1e-10


def test_quality_beside_other_libraries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "peers.json"
    script = _script("posterior_quality")
    script.main(["--peers", "--smoke", "--json", str(path)])
    assert "features averaged" in capsys.readouterr().out
    rows = {row["posterior"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows.keys() == script.RIVALS.keys()
    for name in ("exact blocks", "KFAC", "EFB", "INF"):  # both convolutions have the Fisher's trace
        assert rows[name]["trace 1"] == pytest.approx(1) and rows[name]["trace 2"] == pytest.approx(1)
    exact = rows["exact blocks"]
    assert exact["divergence"] == 0 and exact["deviation"] == 1
    assert exact["log evidence - exact"] == 0
    assert 0 < rows["EFB"]["divergence"] < 0.01
    if find_spec("laplace") is None:
        assert rows["laplace-torch, curvlinops"]["note"] == "laplace is not installed"


def test_predictions_and_evidence_follow_from_blocks() -> None:
    script = _script("posterior_quality")
    held = script.pooled("outputs averaged", seed=0, samples=20, steps=5)
    net = held.net
    parameters = [*net.model.parameters()]
    gradients = [
        torch.cat([part.flatten() for part in torch.autograd.grad(output, parameters, retain_graph=True)])
        for output in net.model(net.inputs[:4]).flatten()
    ]
    rows = torch.stack(gradients)
    blocks = script.by_layer(net, rows.T @ rows)  # from the order of the parameters
    for layer, jacobian in script.layer_jacobians(net, net.inputs[:4]).items():
        own = jacobian.flatten(0, 1)
        torch.testing.assert_close(blocks[layer], own.T @ own)
    posterior = uq.fit(
        net.model,
        [(net.inputs, net.targets)],
        uq.KFAC(fisher="exact", dtype=torch.float64),
        prior_precision=3.0,
        progress=False,
    )
    found = script.predicted(
        held, {layer: block.dense()[0] for layer, block in posterior.blocks.items()}, 3.0
    )
    assert found.evidence == pytest.approx(float(posterior.log_marginal_likelihood()))
    expected = uq.wrap(net.model, posterior, "linearized")(held.inputs).logits_variance
    torch.testing.assert_close(found.covariance.diagonal(dim1=1, dim2=2), expected)


@pytest.mark.study
def test_fit_cost_gives_multiples_of_the_plain_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cost.json"
    _script("fit_cost").main(["--smoke", "--json", str(path)])
    assert "load average" in capsys.readouterr().out
    diagonal, inf = json.loads(path.read_text())["rows"]
    for row, method in ((diagonal, "diag"), (inf, "inf")):
        assert row["method"] == method and row["samples"] == 128 and row["note"] is None
        assert row["fit"] >= row["sweeps + sparsify"] >= row["sweeps"] > 0
        assert len(row["fits"]) == 2
    assert inf["plain, MiB"] > 50
    assert 0.1 < inf["saved, MiB"] < 1
    assert inf["allowed, MiB"] == round(3 * inf["saved, MiB"] + 256) and inf["within"]


@pytest.mark.study
@pytest.mark.skipif(find_spec("laplace") is not None, reason="a peer is installed here")
def test_fit_cost_reports_a_peer_that_fails_or_takes_too_long(tmp_path: Path) -> None:
    path = tmp_path / "lenet.npz"
    _script("_cases").write_data("lenet", path, 1)
    worker = _script("_peer_client").PeerWorker(Path(sys.executable))
    worker.prepare("lenet", path)
    try:
        assert worker.fit("laplace kron AsdlEF", limit=0, plain=0) == {"error": "over 0 s"}
        error = worker.fit("laplace kron AsdlEF", limit=60, plain=0)["error"]  # in a new process
    finally:
        worker.close()
    assert error.startswith("ModuleNotFoundError") and "laplace" in error
    fit_cost = _script("fit_cost")
    row = {
        "case": "lenet",
        "method": "laplace kron AsdlEF",
        "samples": 64,
        **fit_cost.peer_columns([], error),
    }
    assert row["fit"] is None and "ModuleNotFoundError" in fit_cost.printed([row])


@pytest.mark.study
def test_predict_cost_gives_multiples_of_a_forward_pass(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    script = _script("predict_cost")
    script.main(["--smoke", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["what"] for row in rows] == 2 * [*script.HEADS, "novelty"]
    for row in rows:
        assert "note" not in row and 0 < row["least"] <= row["multiple"] <= row["most"]


@pytest.mark.study
def test_programs_are_set_beside_python(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    _script("export_cost").main(["--smoke", "--json", str(path)])
    classes, regression = json.loads(path.read_text())["rows"]
    for row in (classes, regression):
        assert row["off, .pt2"] < 1e-5 and row["export"] > 0 and row["run"] > 0
    assert classes["operations"] > regression["operations"]


@pytest.mark.study
@pytest.mark.skipif(not (BENCHMARKS.parent / ".git").exists(), reason="this is no checkout of the repository")
def test_two_commits_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    script = _script("between_commits")
    script.main(["--smoke", "--json", str(path)])
    assert "new / old" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [row["what"] for row in rows] == [*script.FITS, *script.HEADS]
    for row in rows:
        assert row["case"] == "mlp" and row["new / old"] == pytest.approx(row["new"] / row["old"])


def test_predictions_are_compared_with_those_of_an_earlier_commit(tmp_path: Path) -> None:
    path = tmp_path / "unchanged.csv"
    _script("unchanged").main(["--smoke", "--csv", str(path)])
    with path.open() as file:
        lines = {line["row"]: line for line in csv.DictReader(file)}
    assert lines.keys() >= {"given prior", "earlier settings", "default", "default, calibrated"}
    assert all(abs(float(line["NLL, change"])) < 1e-9 for line in lines.values())
    assert lines["default"]["layers, earlier"] == lines["default"]["layers, now"] == "2"


def test_a_line_has_the_ratios_of_the_rounds() -> None:
    old, new = [{"fit": 2.0}, {"fit": 4.0}, {"fit": 3.0}], [{"fit": 3.0}, {"fit": 4.0}, {"fit": 6.0}]
    (line,) = _script("between_commits").compared(old, new)
    assert (line["old"], line["new"]) == (3.0, 4.0)
    assert (line["least"], line["new / old"], line["largest"]) == (1.0, 1.5, 2.0)


def test_a_line_of_the_table_of_costs_leaves_out_what_a_commit_cannot_measure() -> None:
    what, other = "all layers, LeNet", "another"
    found = {
        "old": [{what: 4.0}, {}, {what: 8.0}],
        "new": [{what: 2.0, other: 1.0}, {what: 3.0}, {what: 2.0}],
    }
    line, alone = _script("between_commits").table_lines(found, "lenet")
    assert (line["what"], line["old"], line["new"], line["goal"], line["rounds"]) == (what, 6.0, 2.0, 15, 3)
    assert (line["new / old"], line["ratio, least to largest"]) == (0.375, "0.25 to 0.5")
    assert (alone["old"], alone["new"], alone["new / old"], alone["goal"]) == (None, 1.0, None, None)


@pytest.mark.study
@pytest.mark.skipif(not (BENCHMARKS.parent / ".git").exists(), reason="this is no checkout of the repository")
def test_the_table_of_costs_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "costs.csv"
    _script("between_commits").main(["--table", "--smoke", "--csv", str(path)])
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert "16,384 rows of a table, all layers" in [line["what"] for line in lines]
    assert all(float(line["new"]) > 0 and float(line["old"]) > 0 for line in lines)


@pytest.mark.study
def test_operations_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    _script("operations").main(["--smoke", "--json", str(path)])
    rows = {row["what"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["forward"] | {"reads": 0, "float64": 0} == rows["forward"]
    assert rows["forth and back"]["over forth and back"] == 1
    for layers in ("last", "all"):
        fit = rows[f"fit, {layers}"]["operations"]
        assert fit > rows[f"search's trial, {layers}"]["operations"] > rows["forward"]["operations"]
        assert rows[f"prediction, {layers}"]["reads"] > 0


@pytest.mark.study
def test_links_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    _script("link_cost").main(["--smoke", "--json", str(path)])
    rows = {(row["link"], row["deviation"]): row for row in json.loads(path.read_text())["rows"]}
    for deviation in (0.5, 2.0, 6.0, 14.0):
        points, probit = rows["mc", deviation], rows["probit", deviation]
        assert points["TV"] < min(probit["TV"], 2 * points["noise"] + 0.005)
        assert points["microseconds a row"] > 0


@pytest.mark.study
def test_a_language_model_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.json"
    _script("language_cost").main(["--smoke", "--json", str(path)])
    assert "forward passes" in capsys.readouterr().out
    rows = {row["what"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == {"forward", "forward and backward", "fit, diag", "fit, inf"}
    assert all(row["seconds"] > 0 for row in rows.values())


@pytest.mark.study
def test_the_table_of_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.json"
    _script("models_table").main(["--smoke", "--json", str(path)])
    assert "| GPT-2 with LoRA | yes | yes | yes | each position |" in capsys.readouterr().out
    result = json.loads(path.read_text())
    assert len(result["rows"]) == 2 and result["errors"] == []


@pytest.mark.study
def test_predictions_are_timed_and_handed_over_to_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, peers = _script("predict_peers"), _script("peers")
    path = tmp_path / "cost.json"
    script.main(["--smoke", "--json", str(path)])
    assert "multiples of a plain forward" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [row["prediction"] for row in rows] == list(script.OURS)
    for row in rows:
        assert 0 < row["least"] <= row["multiple"] <= row["most"] and "note" not in row
        drawn = row["prediction"].startswith("sampling")
        assert row["per draw"] == (pytest.approx(row["multiple"] / script.DRAWS) if drawn else None)
    study = script.Study("lenet, no biases", epochs=1, samples=70)
    study.write(tmp_path / "trained.npz")
    handed = peers.read_trained("lenet, no biases", tmp_path / "trained.npz")
    assert handed.model(handed.inputs).equal(study.model(study.inputs))
    assert [len(labels) for _, labels in handed.batches] == [64, 6]
    assert handed.variances.keys() == dict(study.model.named_parameters()).keys()
    same = study.moments("linearized, kfac", 1.0)
    found = script.compared(same, same)
    assert found["median ratio"] == 1 and found["correlation"] == pytest.approx(1)
    if find_spec("laplace") is None:
        worker = _script("_peer_client").PeerWorker(Path(sys.executable))
        try:
            lines = script.measure("lenet", study, tmp_path / "trained.npz", worker, (8,), 1, 0.0)
        finally:
            worker.close()
        assert "laplace" in {line["prediction"]: line for line in lines}["laplace GLM"]["note"]


@pytest.mark.study
def test_scaling_fits_slopes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script("scaling")
    assert script.slope([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)
    path = tmp_path / "scaling.json"
    script.main(["--smoke", "--json", str(path)])
    assert "Slopes" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert {row["study"] for row in found["rows"]} == {"samples", "width", "layers", "outputs", "rank"}
    assert all(row["fit, s"] >= row["sweeps, s"] > 0 for row in found["rows"])
    assert len(found["slopes"]) == len(found["rows"]) // 2
    assert all(isfinite(line[cost]) for line in found["slopes"] for cost in ("plain", "sweeps", "fit"))
    measured = [row for row in found["rows"] if "peak + MiB" in row]
    assert [row["value"] for row in measured] == [64, 128]
    assert all(row["peak + MiB"] > 0 for row in measured)


@pytest.mark.study
def test_defaults_are_held_against_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script("defaults")
    script.main(["--smoke", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "harm.json").read_text())
    iris = found["pairs"]["iris, mlp relu 32 32"]
    network, own = iris["network"], iris["fit and wrap"]
    assert network["worse"] == [] and network["accuracy"] > 0.9
    # what the rule says, from its own words
    lost = network["accuracy"] - own["accuracy"] > 1 / 60 + 1e-9
    assert ("accuracy" in own["worse"]) == lost
    assert ("NLL" in own["worse"]) == (own["NLL"] > network["NLL"] + 0.04)
    assert ("ECE" in own["worse"]) == (own["ECE"] > network["ECE"] + 0.02)
    assert {"last layer", "EFB", "KFAC", "diagonal", "full"} <= iris.keys()
    values = found["pairs"]["diabetes, mlp relu 32 32"]
    assert values["fit and wrap"]["RMSE"] < 1.01 * values["network"]["RMSE"]
    assert all("error" not in row for rows in found["pairs"].values() for row in rows.values())
    if find_spec("laplace") is None:
        assert "laplace is not installed" in printed
    script.main(["--smoke", "--show", "--output", str(tmp_path)])  # from the files alone
    assert json.loads((tmp_path / "harm.json").read_text())["pairs"] == found["pairs"]


def test_foreign_inputs_are_told_by_ranks() -> None:
    _script("defaults")
    novelty = sys.modules["_novelty"]
    familiar = torch.tensor([4.0, 1.0, 3.0, 2.0])
    expected = [(1 + sum(f >= s for f in familiar.tolist())) / 5 for s in (0.5, 2.0, 2.5, 9.0)]
    assert novelty.tail(torch.tensor([0.5, 2.0, 2.5, 9.0]), familiar).tolist() == pytest.approx(expected)

    def scores(inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"entropy": inputs[:, 0], "novelty": inputs[:, 1]}

    generator = torch.Generator().manual_seed(0)
    test = torch.randn(400, 2, generator=generator)
    foreign = {f"column {c}": torch.randn(200, 2, generator=generator) for c in (0, 1)}
    for column, inputs in enumerate(foreign.values()):
        inputs[:, column] += 4
    found = novelty.aurocs(scores, test, foreign, [("entropy", "novelty")])
    assert found["entropy"]["column 0"] > 0.99 and 0.4 < found["entropy"]["column 1"] < 0.6
    assert min(found["entropy and novelty"].values()) > 0.95


@pytest.mark.study
def test_layers_are_compared_on_networks_of_each_kind(tmp_path: Path) -> None:
    script = _script("which_layers")
    script.main(["--smoke", "--output", str(tmp_path)])
    with (tmp_path / "which_layers.csv").open() as file:
        lines = {(line["networks"], line["choice"]): line for line in csv.DictReader(file)}
    every, last = lines["perceptrons", "all layers"], lines["perceptrons", "last layer"]
    assert every["AUROC, novelty"] == last["AUROC, novelty"]  # of the inputs of the last layer
    assert float(every["AUROC, epistemic variance"]) > float(last["AUROC, epistemic variance"])
    assert float(every["prediction, passes"]) > float(last["prediction, passes"])
    every, last = lines["tables", "all layers"], lines["tables", "last layer"]
    assert float(every["deviation, outside"]) > float(last["deviation, outside"])


@pytest.mark.study
def test_drift_is_found_in_streams_of_scores(tmp_path: Path) -> None:
    _script("drift").main(["--smoke", "--output", str(tmp_path)])
    with (tmp_path / "drift_found.csv").open() as file:
        (few, more, many) = csv.DictReader(file)
    assert [line["held-out rows"] for line in (few, more, many)] == ["100", "200", "1000"]
    assert many["early"] == "0" and many["found"] == many["streams"] and float(many["best AUROC"]) > 0.9
    with (tmp_path / "drift_false_alarms.csv").open() as file:
        assert all(line["monitor"] == "0" for line in csv.DictReader(file))


@pytest.mark.study
def test_leave_one_out_is_compared_by_rule(tmp_path: Path) -> None:
    script = _script("left_out")
    script.main(["rules", "--smoke", "--output", str(tmp_path)])
    with (tmp_path / "leave_one_out.csv").open() as file:
        lines = {(line["pairs"], line["rule"]): line for line in csv.DictReader(file)}
    now = lines["memorised, reported", f"{script.NOW} (now)"]
    assert float(now["share of the best temperature's gain"]) > 0.5 and now["harmed"] == "none"
    assert float(lines["memorised, reported", script.NETWORK]["NLL"]) > float(now["NLL"])


@pytest.mark.study
def test_the_server_answers_as_the_library_under_load(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    _script("serve_load").main(["--smoke", "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert row["wrong"] == 0 and row["requests"] == 60
    assert 0 < row["p50, ms"] <= row["p99, ms"]
    assert row["memory after, MiB"] < 1.2 * row["memory before, MiB"]


@pytest.mark.study
def test_attacks_on_the_server_find_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    script = _script("serve_attack")
    assert script.main(["--smoke", "--only", "names"]) == 0, capsys.readouterr().out
    assert "bad outcomes" in capsys.readouterr().out


@pytest.mark.study
def test_attacks_on_the_library_find_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    script = _script("attacks")
    assert script.main(["--smoke"]) == 0, capsys.readouterr().out
    shown = capsys.readouterr().out
    assert all(shown.count(f"\n{kind}") > 10 for kind in ("weights that change", "signals that raise"))
    kinds = {
        "damaged files": 9,
        "files of strangers": 9,
        "damaged checkpoints": 9,
        "checkpoints of strangers": 9,
    }
    kinds |= {"two commands": 1, "killed fits": 3}
    assert all(shown.count(f"\n{kind}") >= number for kind, number in kinds.items())


@pytest.mark.study
def test_tuning_is_held_against_the_untuned_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _script("tuning").main(["--smoke", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "tuning.json").read_text())
    rows = {row["row"]: row for row in found["classes"]}
    last = {"untuned, last layer", "tuned, last layer"}
    assert rows.keys() == {"network", "untuned", "temperature scaling", "tuned"} | last
    assert all(isfinite(row["NLL"]) and 0 <= row["ECE"] <= 1 for row in rows.values())
    untuned, tuned = found["values"][1:3]
    assert (untuned["row"], tuned["row"]) == ("untuned", "tuned")
    # the fit has set its own noise by leave-one-out
    assert all(0.6 < row["coverage"] <= 1 and isfinite(row["NLL"]) for row in (untuned, tuned))
    assert "coverage of 90%" in capsys.readouterr().out


@pytest.mark.study
def test_promises_are_kept_within_what_so_few_splits_show(tmp_path: Path) -> None:
    _script("promises").main(["--smoke", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "promises.json").read_text())["rows"]
    assert [row["table"] for row in rows] == [t for t in ("moons", "diabetes", "waves") for _ in range(3)]
    assert all(row["coverage, familiar"] > row["level"] - 0.15 for row in rows)


def test_what_an_option_of_a_fit_does_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    _script("fit_options").main(["everything", "--smoke"])
    lines = {line.split(" | ")[1]: line.split(" | ") for line in capsys.readouterr().out.splitlines()[-4:-2]}
    assert float(lines["default"][2]) < float(lines["everything"][2]) == 1.0
    assert abs(float(lines["default"][3]) - float(lines["everything"][3])) < 0.1


def test_an_output_that_cannot_be_written_is_found_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every script that has one: which one is known by the type of its option."""
    found = [path for path in sorted(BENCHMARKS.glob("[a-z]*.py")) if "type=output_" in path.read_text()]
    assert len(found) == 30
    for path in BENCHMARKS.glob("*.py"):
        assert not re.search(r'"--(json|csv|picture|output)", type=Path', path.read_text()), path
    (tmp_path / "file").write_text("in the way")
    harness = _script("_harness")
    for kind, place in ((harness.output_file, "none/x.json"), (harness.output_folder, "file")):
        command = argparse.ArgumentParser()
        command.add_argument("--to", type=kind)
        with pytest.raises(SystemExit):
            command.parse_args(["--to", str(tmp_path / place)])
        assert "argument --to: " in capsys.readouterr().err
    assert harness.output_folder(str(tmp_path / "new")).is_dir()


@pytest.mark.study
def test_class_rates(tmp_path: Path) -> None:
    _script("class_rates").main(["--smoke", "--output", str(tmp_path)])
    for name in ("logits", "library"):
        lines = (tmp_path / f"class_rates_{name}.csv").read_text().splitlines()
        assert {line.split(",")[4] for line in lines[1:]} == {"temperature", "auto", "bias", "vector"}
        assert {line.split(",")[0] for line in lines[1:]} == {"balanced", "agree", "some"}


@pytest.mark.study
def test_utvi_kappa(tmp_path: Path) -> None:
    _script("utvi_kappa").main(["--smoke", "--output", str(tmp_path)])
    with (tmp_path / "utvi_kappa.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["kappa"].split(":")[0] for row in rows] == ["0", "0.5", "1", "2", "3", "learned"] * 2
    assert all(isfinite(float(row[name])) for row in rows for name in ("NLL", "error of deviations"))


def test_softargmax(capsys: pytest.CaptureFixture[str]) -> None:
    _script("softargmax").main(["--sets", "10", "--draws", "1000"])
    for line in capsys.readouterr().out.splitlines()[2:]:
        rooted, printed = (float(cell.split("±")[0]) for cell in line.split("|")[2:4])
        assert 0 < rooted < printed < 0.5


@pytest.mark.study
def test_few_labels(tmp_path: Path) -> None:
    _script("few_labels").main(["--smoke", "--output", str(tmp_path)])
    for name in ("logits", "library"):
        lines = (tmp_path / f"few_labels_{name}.csv").read_text().splitlines()
        rules = {line.split(",")[3].strip('"') for line in lines[1:]}
        assert {"temperature scaling"} < rules and len(lines) > 6


@pytest.mark.study
def test_referral(tmp_path: Path) -> None:
    _script("referral").main(["--smoke", "--output", str(tmp_path)])
    header, *lines = (tmp_path / "referral.csv").read_text().splitlines()
    assert header.startswith("network,group,errors,join,AURC") and len(lines) == 11


@pytest.mark.study
def test_ensembles(tmp_path: Path) -> None:
    _script("ensembles").main(["--smoke", "--output", str(tmp_path)])
    for name, rows in (("classifiers", 8), ("regressors", 8)):
        header, *lines = (tmp_path / f"ensembles_{name}.csv").read_text().splitlines()
        assert header.startswith("pair,row,") and len(lines) == rows


@pytest.mark.study
def test_underconfident(tmp_path: Path) -> None:
    _script("underconfident").main(["--smoke", "--output", str(tmp_path)])
    header, *lines = (tmp_path / "underconfident_unsure.csv").read_text().splitlines()
    assert header.startswith("network,group,rule,accuracy") and len(lines) == 4


@pytest.mark.study
def test_laplace_torch_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("laplace", reason="laplace-torch is not installed")
    _script("laplace_check").main([])  # which asserts it
    assert len(capsys.readouterr().out.splitlines()) == 6
