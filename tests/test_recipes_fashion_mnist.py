"""The FashionMNIST recipe: its reading of the files, and a small run on other images in the same format."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

RECIPE = Path(__file__).parents[1] / "recipes" / "fashion_mnist"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """scikit-learn's digits in the four files of FashionMNIST, as Debian ships them."""
    target = tmp_path_factory.mktemp("idx")
    pixels, labels = load_digits(return_X_y=True)
    images = np.kron(pixels.reshape(-1, 8, 8), np.ones((3, 3)))  # 24 x 24
    images = np.pad(images * (255 / 16), ((0, 0), (2, 2), (2, 2))).round().astype(np.uint8)
    for name, part in (("train", slice(0, 1500)), ("t10k", slice(1500, None))):
        chosen = images[part]
        header = struct.pack(">IIII", 0x803, len(chosen), 28, 28)
        (target / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + chosen.tobytes()))
        header = struct.pack(">II", 0x801, len(chosen))
        numbers = labels[part].astype(np.uint8).tobytes()
        (target / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + numbers))
    return target


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RECIPE / "run.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_files_are_read_as_they_were_written(folder, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(RECIPE)!r}); from pathlib import Path; import data; "
        f"d = data.load(Path({str(folder)!r}), Path({str(tmp_path)!r})); "
        "print([list(p.images.shape) for p in d[:3]], list(d.digits.shape), d.test.labels[:5].tolist(), "
        "float(d.train.images.min()), float(d.train.images.max()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    expected = load_digits(return_X_y=True)[1][1500:1505].tolist()
    low, high = -0.2860 / 0.3530, (1 - 0.2860) / 0.3530
    shapes, numbers = found.rsplit("] ", 1)
    assert shapes == (
        f"[[1250, 1, 28, 28], [250, 1, 28, 28], [297, 1, 28, 28]] [5000, 1, 28, 28] [{str(expected)[1:-1]}"
    )
    assert [float(n) for n in numbers.split()] == pytest.approx([low, high], abs=1e-5)


def test_smoke(folder, tmp_path):
    done = run("--smoke", "--data", folder, "--output", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "600-1-0.01" / "results-40-seed0.json").read_text())
    heads = ("linearized, probit", "linearized, mc", "sampling", "moments")
    rows = [f"{posterior}, {head}" for posterior in ("INF", "last layer, EFB") for head in heads]
    assert list(results) == ["plain", "temperature scaling", *rows, "deep ensemble of 2"]
    assert set(results["plain"]["AUROC"]) == {"entropy", "max_probability"}
    assert "functional_variance" in results["INF, linearized, probit"]["AUROC"]
    assert results["INF, sampling"]["settings"]["prior_precision"] > 0
    assert results["deep ensemble of 2"]["bytes"] == 2 * results["plain"]["bytes"]
    table = (tmp_path / "600-1-0.01" / "table.md").read_text()
    assert all(f"| {name} |" in table for name in results) and table in done.stdout


def test_help_names_the_options():
    shown = run("--help").stdout
    assert all(option in shown for option in ("--seeds", "--data", "--smoke", "--posteriors"))
