"""The notebooks and the guide for users of laplace-torch: their code runs, and gives what their texts say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
for _package in ("ipykernel", "sklearn", "skimage", "mlxtend", "pandas", "timm"):
    pytest.importorskip(_package)

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"

# What the texts claim of the numbers, run in the notebook's own kernel after its last cell.
CLAIMS = {
    "quickstart": """
import sys
assert sys.executable == {python!r}, "another environment's kernel"
metrics, foreign_by = evaluation.metrics, evaluation.foreign
alone = metrics["network alone"]
assert alone["accuracy"] > 0.9
assert abs(float(sure["photos"].mean()) - float(sure["test digits"].mean())) < 0.1
assert foreign_by["network alone"]["photos"]["entropy"]["auroc"] < 0.65
entropy = [foreign_by[name]["photos"]["entropy"]["auroc"] for name in ("network alone", "as fitted", "tuned")]
assert min(entropy[1:]) > entropy[0] + 0.05
assert metrics["tuned"]["nll"] < metrics["as fitted"]["nll"] < alone["nll"]
assert max(metrics["tuned"]["ece"], metrics["as fitted"]["ece"]) < alone["ece"]
assert abs(metrics["as fitted"]["accuracy"] - alone["accuracy"]) <= 0.004
assert metrics["tuned"]["accuracy"] >= alone["accuracy"]
for name in ("as fitted", "tuned"):
    for place in ("photos", "letters"):
        novelty = foreign_by[name][place]["novelty"]["auroc"]
        assert novelty > 0.8 and novelty == max(
            foreign_by[name][place][score]["auroc"] for score in ("entropy", "mutual_information", "novelty")
        )
        assert novelty == foreign_by["as fitted"][place]["novelty"]["auroc"]
shares = {{name: float(flag.float().mean()) for name, flag in flags.items()}}
assert shares["test digits"] < 0.1 and shares["photos"] > 0.95 and 0.4 < shares["letters"] < 0.6
for place in ("photos", "letters"):
    assert table.loc[place, "entropy or novelty"] > table.loc[place, "the network's entropy"]
assert table.loc["photos", "novelty"] == table.loc["photos"].max()
assert right[~kept].float().mean() < right[kept].float().mean() - 0.1
assert right[kept].float().mean() > alone["accuracy"] + 0.01
assert metrics["tuned"]["nll"] < 0.26
assert same
""",
    "choosing_a_posterior": """
error = fishers["within layers"]
assert 0.25 < distance(exact * within, exact) < 0.35
assert error["full"] < 1e-12 and error["diag"] > 0.9
assert error["efb"] <= error["kfac"] and error["kfac"] < 0.4
assert (fishers.loc[["full", "diag", *[i for i in fishers.index if i.startswith("inf")]], "diagonal"] < 1e-9).all()
assert (fishers.loc[["kfac", "efb"], "diagonal"] > 0.05).all()
assert error["inf, rank 100"] < error["inf, rank 20"] < error["efb"] < error["inf, rank 5"]
alone = evaluation.metrics["network alone"]
fitted = ["diag", "kfac", "efb", "inf", "inf, last layer"]
others = ["inf, sampling", "inf, moments"]
for name in (*fitted, *others, "inf, tuned"):
    own = evaluation.metrics[name]
    assert own["nll"] < alone["nll"] and own["ece"] < alone["ece"]
    assert abs(own["accuracy"] - alone["accuracy"]) <= 0.004
    assert table.loc[name, "AUROC, entropy"] > table.loc["network alone", "AUROC, entropy"]
likelihoods = [evaluation.metrics[name]["nll"] for name in (*fitted, *others)]
assert max(likelihoods) - min(likelihoods) < 0.01
assert evaluation.metrics["inf, tuned"]["nll"] < evaluation.metrics["inf"]["nll"]
assert evaluation.metrics["inf, tuned"]["ece"] < evaluation.metrics["inf"]["ece"]
assert min(files["kfac"], files["efb"]) > 9 * files["inf"]
assert likelihoods[0] < alone["nll"] - 0.015
assert min(files, key=files.get) == "inf, last layer" and files["inf, last layer"] < files["inf"] / 3
assert evaluation.metrics["inf, evidence, sampling"]["accuracy"] < alone["accuracy"] - 0.1
novelty = table["AUROC, novelty"].dropna()
assert novelty.max() - novelty.min() < 1e-6 and novelty.max() == table.filter(like="AUROC").max().max()
assert table.loc["network alone", "AUROC, entropy"] > 0.75
""",
    "deploying": """
assert answer["refer"] == referral(here).tolist() and 0 < sum(answer["refer"]) < 50
assert max(abs(a - b) for a, b in zip(answer["probability"], here.max_probability().tolist())) < 1e-6
assert times["last layer, linearised"] < 2 * plain < times["all layers, linearised, top 3 classes"]
assert times["all layers, moments"] < times["all layers, linearised, top 3 classes"]
assert (entropy - closed(request).entropy()).abs().max() < 1e-4
assert agree > 0.9
last_layer = [count for name, count in times.items() if name.startswith("last layer")]
every_layer = [count for name, count in times.items() if name.startswith("all layers")]
assert max(last_layer) < 4 * plain < min(every_layer) and max(every_layer) < 20 * plain
first = alarms["first alarm at input"]
assert alarms.loc["no drift", "alarms"] == 0 and first.isna().sum() == 1
turned = alarms.loc["turned by 2 degrees more each window"]
noisier = alarms.loc["more noise each window"]
assert first.min() > begins * size and turned["by"] == noisier["by"] == "novelty"
assert first[turned.name] < 1000 and turned["of the last 500"] < 0.4
assert turned["of the 50 inputs before it"] < turned["accuracy before"] - 0.05
assert first[noisier.name] < 1200 and noisier["of the 50 inputs before it"] > 0.9
assert read > 0.8 and spread_after < spread_before
""",
}


def test_every_notebook_has_claims_to_check() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == CLAIMS.keys()


def executed(name: str, claims: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a copy of a notebook, and the claims in its kernel; raises what a cell raised."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(claims.format(python=sys.executable)))
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=resources).execute()


@pytest.mark.study
def test_the_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed("quickstart", "assert same", tmp_path, monkeypatch)


@pytest.mark.study
@pytest.mark.parametrize("name", sorted(CLAIMS))
def test_a_notebook_s_text_agrees(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed(name, CLAIMS[name], tmp_path, monkeypatch)


@pytest.mark.parametrize("name", sorted(CLAIMS))
def test_notebook_is_stored_as_run(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(len(str(output)) < 200_000 for output in outputs)
    assert notebook.cells[-1].source.startswith("## What it showed\n")
    assert "/home/" not in str(outputs) and "site-packages" not in str(outputs)
