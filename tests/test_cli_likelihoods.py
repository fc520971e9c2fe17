"""Likelihoods from the command line: fit, evaluate and predict of multilabel, counts, ordered classes, own noise."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from cli_helpers import NETS, failure, make_images, run, run_json
from torch import nn

import posthoc_uq as uq

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CODE = (
    NETS
    + """

def inputs():
    return torch.randn(30, 3, generator=torch.Generator().manual_seed(0))


def labels():
    x = inputs()
    return TensorDataset(x, (x > 0.3).long())


def counts():
    x = inputs()
    return TensorDataset(x, torch.poisson(x[:, 0].exp(), generator=torch.Generator().manual_seed(1)))


def ordered():
    x = inputs()
    return TensorDataset(x, (x[:, 0] > -0.5).long() + (x[:, 0] > 0.5).long())


def values():
    x = inputs()
    return TensorDataset(x, x[:, :1])
"""
)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "tables.py"
    path.write_text(CODE)
    return path


def net(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def inputs() -> torch.Tensor:
    return torch.randn(30, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("likelihood", "model", "data", "options", "measure", "columns"),
    [
        ("multilabel", "three", "labels", [], "mAP", "label_1 probability_1 label_2 probability_2"),
        ("poisson", "one", "counts", [], "mean deviance", "mean standard_deviation epistemic_sd lower upper"),
        ("negative_binomial", "one", "counts", ["dispersion=0.4"], "RMSE", "mean standard_deviation"),
        ("ordinal", "one", "ordered", ["thresholds=-0.5,0.5"], "RPS", "label_1 probability_1 label_2"),
        ("heteroscedastic", "two", "values", [], "log density", "mean standard_deviation epistemic_sd"),
        ("classification", "three", "ordered", ["label-smoothing=0.1"], "accuracy", "label_1 probability_1"),
    ],
)
def test_from_fit_to_a_table(
    code: Path,
    tmp_path: Path,
    likelihood: str,
    model: str,
    data: str,
    options: list[str],
    measure: str,
    columns: str,
) -> None:
    file, out = tmp_path / "p.h5", tmp_path / "p.csv"
    own = ["--model", f"{code}:{model}"]
    given = [part for option in options for part in ("--likelihood-option", option)]
    fitted = ["--likelihood", likelihood, *given, "--method", "kfac", "--prior-precision", 2]
    run("fit", f"{code}:{data}", *own, "-o", file, *fitted)
    said = run_json("evaluate", file, f"{code}:{data}", *own)
    assert measure in said["quality"]["kfac, linearized"]
    run("predict", file, f"{code}:{data}", *own, "-o", out, "--top-k", 2)
    with open(out, newline="") as text:
        rows = list(csv.DictReader(text))
    assert len(rows) == 30 and " ".join(rows[0]).startswith(f"file {columns}")
    network = net({"one": 1, "two": 2, "three": 3}[model])
    prediction = uq.wrap(network, uq.load(file, network))(inputs())
    if "mean" in rows[0]:
        assert [float(row["mean"]) for row in rows] == pytest.approx(
            prediction.mean.flatten().tolist(), rel=1e-4
        )
    else:
        top = prediction.top_k(2)
        assert [int(row["label_1"]) for row in rows] == top.labels[:, 0].tolist()
        found = [float(row["probability_2"]) for row in rows]
        assert found == pytest.approx(top.probabilities[:, 1].tolist(), rel=1e-4)


def test_options_that_are_none(code: Path, tmp_path: Path) -> None:
    own = [f"{code}:counts", "--model", f"{code}:one", "-o", tmp_path / "p.h5", "--likelihood"]
    said = failure("fit", *own, "gamma", "--likelihood-option", "dispersion=2")
    assert "--likelihood-option 'dispersion=2' is none of likelihood 'gamma'; it has shape=..." in said
    assert "has no options" in failure("fit", *own, "poisson", "--likelihood-option", "rate=2")
    assert "shape must be" in failure("fit", *own, "gamma", "--likelihood-option", "shape=small")
    assert "above 0; these run from 0" in failure("fit", *own, "gamma", "--likelihood-option", "shape=2.5")


def test_folders_of_classes_are_no_counts(code: Path, tmp_path: Path) -> None:
    make_images(tmp_path / "photos", ("a", "b"), 2, 0)
    for likelihood in ("poisson", "multilabel", "heteroscedastic", "gamma"):
        arguments = ["--model", f"{code}:one", "-o", tmp_path / "p.h5", "--likelihood", likelihood]
        assert "needs targets that are numbers" in failure("fit", tmp_path / "photos", *arguments)
