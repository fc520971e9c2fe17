"""The recipe imagenet on a small generated folder with EfficientNet-Lite0's real weights: its smoke mode as a script,
by one process and by two, and its parts against independent computations.
"""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from recipe_helpers import recipe_modules
from recipe_helpers import smoke as run_smoke
from scipy.stats import kstest
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import ClassPrediction, PosthocUQError
from posthoc_uq.app import ImageTransform, ModelSource, TrainedModel, trained_model
from recipes.common import NOTE

NAMES = ("example", "folders", "fitting", "search", "evaluating", "figures", "run", "sizes", "corruptions")
INDICES = {  # of ImageNet's 1,000 classes, as everybody numbers them
    "n02123159": 282,  # tiger cat
    "n03773504": 657,  # missile
    "n03785016": 665,  # moped
    "n03877845": 698,  # palace
    "n04485082": 872,  # tripod
    "n04548280": 892,  # wall clock
    "n07920052": 967,  # espresso
    "n11939491": 985,  # daisy
}


@pytest.fixture(scope="module")
def recipe() -> Namespace:
    return recipe_modules("imagenet", NAMES)


def _run_in_two_processes(arguments: Sequence[Any]) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher += ["--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *launcher, "-m", "recipes.imagenet.run", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=500,
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output folder of the smoke mode, and what it printed."""
    folder = tmp_path_factory.mktemp("imagenet") / "one"
    return folder, run_smoke("imagenet.run", "--output", folder, "--no-progress")


def _source(folder: Path, size: int = 64) -> TrainedModel:
    weights = str(folder / "data" / "efficientnet_lite0.pt")
    source = ModelSource(model="timm:tf_efficientnet_lite0", weights=weights, image_size=size, device="cpu")
    return trained_model(source)


def _probabilities(source: TrainedModel, files: Sequence[Path]) -> Tensor:
    """Of the network alone, by PIL and the model's own transform."""
    images = [source.transform(Image.open(file).convert("RGB")) for file in files]
    with torch.no_grad():
        return torch.cat(
            [source.model(torch.stack(images[i : i + 8])) for i in range(0, len(images), 8)]
        ).softmax(1)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.JPEG"), key=lambda file: str(file.relative_to(folder)))


# The smoke mode


@pytest.mark.study
def test_smoke_leaves_tables_and_figures(smoke: tuple[Path, str]) -> None:
    folder, printed = smoke
    for name in ("figure6.png", "figure7.png", "search.png"):
        assert (folder / name).read_bytes()[:4] == b"\x89PNG"
        with Image.open(folder / name) as image:
            assert min(image.size) > 300
    text = (folder / "results.md").read_text()
    assert text.strip() in printed and text.startswith(NOTE)
    for row in ("network", "Diag", "KFAC", "EFB", "INF"):
        assert text.count(f"| {row} |") >= 2
    assert not list((folder / "posteriors").glob("*checkpoint*"))
    assert not list((folder / "evaluations").glob("*part*"))


@pytest.mark.study
def test_the_network_s_row_against_other_libraries(smoke: tuple[Path, str], recipe: Namespace) -> None:
    folder, _ = smoke
    found = json.loads((folder / "results.json").read_text())["rows"]["network"]
    files = _files(folder / "data" / "val")
    rest = recipe.folders.parted(len(files), 8, None, 0)[1]
    assert len(files) == 24 and found["inputs"] == {"test": 16, "ood": 12}
    labels = np.array([INDICES[files[i].parent.name] for i in rest])
    source = _source(folder)
    inside = _probabilities(source, [files[i] for i in rest]).double()
    outside = _probabilities(source, _files(folder / "data" / "ood")).double()
    quality = found["quality"]["network"]
    assert quality["accuracy"] == pytest.approx(float((inside.argmax(1).numpy() == labels).mean()))
    loss = log_loss(labels, (inside / inside.sum(1, keepdim=True)).numpy(), labels=range(1000))
    assert quality["nll"] == pytest.approx(loss, rel=1e-3)
    entropies = [float(-(p * p.log()).sum()) for p in (*inside, *outside)]
    foreign = [0] * len(inside) + [1] * len(outside)
    auroc = found["foreign"]["network"]["ood"]["entropy"]["auroc"]
    assert auroc == pytest.approx(roc_auc_score(foreign, entropies), abs=1e-6)


@pytest.mark.study
def test_the_network_knows_the_photographs(smoke: tuple[Path, str]) -> None:
    """The class map's wnids are the outputs of the real weights: at its own size the network tells most crops."""
    folder, _ = smoke
    source = _source(folder, size=224)
    known = [f for f in _files(folder / "data" / "train") if f.parent.name in ("n07920052", "n04485082")]
    probs = _probabilities(source, known)
    expected = torch.tensor([INDICES[file.parent.name] for file in known])
    assert torch.equal(probs.argmax(1), expected)
    wnids = (folder / "class_map.txt").read_text().split()
    assert len(wnids) == 1000 and {name: wnids.index(name) for name in INDICES} == INDICES


@pytest.mark.study
def test_sizes_follow_from_the_last_layer(smoke: tuple[Path, str]) -> None:
    folder, _ = smoke
    sizes = json.loads((folder / "results.json").read_text())["posteriors"]
    m, n = 1000, 1281
    assert sizes["diag"]["numbers"] == m * n
    assert sizes["kfac"]["numbers"] == m * m + n * n + m + n  # eigenvectors and eigenvalues
    assert sizes["efb"]["numbers"] == m * m + n * n + m * n
    assert m * n < sizes["inf"]["numbers"] < sizes["kfac"]["numbers"]
    for method, size in sizes.items():
        assert size["bytes"] == (folder / "posteriors" / f"{method}.h5").stat().st_size
        # beside the blocks: what novelty goes by, at most 2^20 numbers of the last layer and of each of three stages
        assert 4 * size["numbers"] < size["bytes"] < 4 * (size["numbers"] + 4 * 2**20) + 2**18


@pytest.mark.study
def test_the_best_trial_is_kept_in_the_file(smoke: tuple[Path, str], recipe: Namespace) -> None:
    folder, _ = smoke
    options = Namespace(budget=2, select="NLL")
    for method in ("diag", "kfac", "efb", "inf"):
        chosen = recipe.search.best(folder / "trials", method, options)
        known = uq.inspect(folder / "posteriors" / f"{method}.h5")
        assert known["scale"] == chosen.scale and known["prior_precision"] == chosen.prior_precision
        assert "random search" in known["tuning"]["scale"]
        losses = [json.loads(f.read_text())["NLL"] for f in (folder / "trials" / method).glob("*.json")]
        assert len(losses) == 2 and min(losses) == chosen.NLL


@pytest.mark.study
def test_two_processes_and_a_second_run(
    smoke: tuple[Path, str], recipe: Namespace, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, _ = smoke
    data = folder / "data"
    arguments = "--smoke --no-progress --methods diag inf".split()
    arguments += ["--train", str(data / "train"), "--val", str(data / "val"), "--ood", f"ood={data / 'ood'}"]
    arguments += ["--weights", str(data / "efficientnet_lite0.pt"), "--output", str(tmp_path / "two")]
    (tmp_path / "two" / "data").mkdir(parents=True)
    (tmp_path / "two" / "data" / "efficientnet_lite0.pt").touch()  # no example of its own
    done = _run_in_two_processes(arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    model = _source(folder).model
    for method in ("diag", "inf"):
        ours, theirs = (uq.load(f / "posteriors" / f"{method}.h5", model) for f in (tmp_path / "two", folder))
        assert ours.scale == theirs.scale and ours.prior_precision == theirs.prior_precision
        # the Fisher counts for something
        ours, theirs = (each.with_settings(scale=1e4, prior_precision=1.0) for each in (ours, theirs))
        spread = ours.variance()
        for name, expected in theirs.variance().items():
            assert float((spread[name] - expected).norm() / expected.norm()) < 1e-3
        for number in range(2):
            file = Path("trials") / method / f"{number:04d}.json"
            one, two = (json.loads((f / file).read_text()) for f in (folder, tmp_path / "two"))
            assert two["NLL"] == pytest.approx(one["NLL"], abs=2e-3)
    one, two = (json.loads((f / "results.json").read_text()) for f in (folder, tmp_path / "two"))
    for row in ("network", "diag", "inf"):
        for name, value in one["rows"][row]["quality"][row].items():
            assert two["rows"][row]["quality"][row][name] == pytest.approx(value, abs=5e-3), (row, name)

    kept = {
        f: f.stat().st_mtime_ns for f in (tmp_path / "two").rglob("*") if f.suffix in (".h5", ".json", ".pt")
    }
    (tmp_path / "two" / "trials" / "inf" / "0001.json").unlink()
    capsys.readouterr()
    assert recipe.run.main(arguments) == 0  # one process goes on from what two have left
    again = capsys.readouterr().out
    assert again.count("found again in") == 2 + 3
    assert "Diag: 2 of 2 trials" in again and "INF: 1 of 2 trials" in again
    for file, time in kept.items():
        repeated = file.parent == tmp_path / "two" or file.name == "0001.json"
        assert repeated or file.stat().st_mtime_ns == time, file
    assert recipe.run.main([*arguments, "--rank", "5"]) == 1
    assert "was made with --rank 100, not 5" in capsys.readouterr().err


# Sizes


@pytest.mark.parametrize("method", ["diag", "kfac", "efb"])
def test_counts_by_shape_are_those_of_a_fit(recipe: Namespace, method: str) -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(), nn.Linear(8 * 16, 5)]
    model, images = nn.Sequential(*layers).eval(), torch.randn(4, 3, 8, 8)
    posterior = uq.fit(model, [images], method=method, fisher="mc", prior_precision=1.0, progress=False)
    assert sum(block.numbers() for block in posterior.blocks.values()) == recipe.sizes.counts(model)[method]


def test_counts_are_the_papers(recipe: Namespace, tmp_path: Path) -> None:
    run_smoke("imagenet.sizes", "--output", tmp_path)
    rows = json.loads((tmp_path / "sizes.json").read_text())["sizes"]
    for row, numbers in rows.items():
        more = numbers["numbers"] / numbers["paper"] - 1
        # KFAC is kept as eigenvectors and eigenvalues, n + m numbers a layer more than the paper's two factors
        assert 0 < more < 1.5e-3 if row.endswith("kfac") else more == 0, row


# Corruptions


@pytest.mark.study
def test_smoke_of_the_corruptions(recipe: Namespace, tmp_path: Path) -> None:
    images, labels = recipe.corruptions.crops(1, 0)
    assert {image.size for image in images} == {(224, 224)}
    assert labels.tolist() == [INDICES[photo.wnid] for photo in recipe.example.PHOTOS]
    run_smoke("imagenet.corruptions", "--output", tmp_path)
    with (tmp_path / "corruptions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * (1 + 6 * 5)  # clean, five corruptions and all of them together
    clean = [row for row in rows if row["severity"] == "0"]
    assert {row["posterior"] for row in clean} == {"network", "Diag", "KFAC", "EFB", "INF"}
    assert all(row["AUROC of entropy"] == row["agreement"] == "" for row in clean)


def test_corruptions_by_their_definitions(recipe: Namespace) -> None:
    """Each pixel by a loop: mean of the mirrored disk, scaled value, and distance from the channel's mean."""
    make, generator = recipe.corruptions, np.random.default_rng(0)
    pixels = generator.random((14, 12, 3))
    blurred = make.defocus_blur(pixels, 1, generator)
    disk = [(i, j) for i in range(-3, 4) for j in range(-3, 4) if i * i + j * j <= 9]
    for row, column in ((0, 0), (7, 5), (13, 11)):
        places = [(row + i, column + j) for i, j in disk]
        inside = [(min(max(i, -1 - i), 27 - i), min(max(j, -1 - j), 23 - j)) for i, j in places]
        expected = sum(pixels[place] for place in inside) / len(disk)
        np.testing.assert_allclose(blurred[row, column], expected, rtol=1e-10)
    brighter, flatter = make.brightness(pixels, 3, generator), make.contrast(pixels, 4, generator)
    for row, column in np.ndindex(14, 12):
        pixel = pixels[row, column]
        expected = pixel * min(1, max(pixel) + 0.3) / max(pixel)
        np.testing.assert_allclose(brighter[row, column], expected, rtol=1e-10)
    for channel in range(3):
        mean = pixels[:, :, channel].sum() / 168
        np.testing.assert_allclose(flatter[:, :, channel], mean + 0.1 * (pixels[:, :, channel] - mean))
    noise = make.gaussian_noise(np.zeros((100, 100, 3)), 2, generator)
    assert noise.std() == pytest.approx(0.12, rel=0.02) and abs(noise.mean()) < 0.003


def test_corruptions_grow_with_their_severity(recipe: Namespace) -> None:
    image = recipe.example.read(recipe.example.PHOTOS[3]).resize((64, 64))
    for name in recipe.corruptions.CORRUPTIONS:
        spoilt = [recipe.corruptions.corrupted(image, name, s, np.random.default_rng(0)) for s in range(1, 6)]
        far = [np.abs(np.asarray(one, float) - np.asarray(image, float)).mean() for one in spoilt]
        assert far[0] > 1 and far == sorted(far), name


def test_a_corrupted_row_against_other_libraries(recipe: Namespace) -> None:
    logits = torch.randn(18, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    given = logits.softmax(1)
    found = recipe.corruptions.scored(given[6:], given[:6], labels, 15)
    probs, twice = given.numpy(), np.tile(labels.numpy(), 2)
    answers = probs.argmax(1)
    entropies = -(probs * np.log(probs)).sum(1)
    assert found["accuracy"] == pytest.approx((answers[6:] == twice).mean())
    assert found["agreement"] == pytest.approx((answers[6:] == np.tile(answers[:6], 2)).mean())
    assert found["NLL"] == pytest.approx(log_loss(twice, probs[6:], labels=range(4)))
    assert found["mean entropy"] == pytest.approx(entropies[6:].mean())
    assert found["AUROC of entropy"] == pytest.approx(roc_auc_score([0] * 6 + [1] * 12, entropies))


# The search


def test_trials_are_log_uniform_and_do_not_depend_on_the_budget(recipe: Namespace) -> None:
    scales, priors = (1e3, 1e8), (1e2, 1e6)
    drawn = np.log10([recipe.search.configuration(i, 7, scales, priors) for i in range(2000)])
    for values, (low, high) in zip(drawn.T, (scales, priors), strict=True):
        uniform = (np.log10(low), np.log10(high) - np.log10(low))
        assert kstest(values, "uniform", args=uniform).pvalue > 1e-3
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.1
    again = recipe.search.configuration(11, 7, scales, priors)
    assert np.allclose(np.log10(again), drawn[11])
    assert recipe.search.configuration(11, 8, scales, priors) != again


def test_search_and_evaluation_images_are_disjoint(recipe: Namespace) -> None:
    searched, rest = recipe.folders.parted(50, 20, None, seed=3)
    assert sorted(searched + rest) == list(range(50)) and len(searched) == 20
    limited = recipe.folders.parted(50, 20, 10, seed=3)
    assert limited[0] == searched and len(limited[1]) == 10 and set(limited[1]) < set(rest)
    assert recipe.folders.parted(50, 20, None, seed=4)[0] != searched
    with pytest.raises(PosthocUQError, match="leaves none to evaluate on"):
        recipe.folders.parted(50, 50, None, seed=0)


def test_the_best_trial(recipe: Namespace, tmp_path: Path) -> None:
    values = [(1.0, 0.05), (0.9, 0.1), (None, None), (0.95, 0.05)]
    (tmp_path / "inf").mkdir()
    for number, (loss, error) in enumerate(values):
        trial = {"number": number, "scale": 1e5, "prior_precision": 10.0 ** (2 + number), "accuracy": 0.5}
        (tmp_path / "inf" / f"{number:04d}.json").write_text(json.dumps(trial | {"NLL": loss, "ECE": error}))
    ranges = {"scales": (1e3, 1e8), "priors": (1e2, 1e8)}
    by_loss = recipe.search.best(tmp_path, "inf", Namespace(budget=4, select="NLL"))
    assert by_loss.number == 1 and recipe.search.at_edge(by_loss, Namespace(**ranges)) == []
    assert recipe.search.best(tmp_path, "inf", Namespace(budget=4, select="ECE")).number == 3
    first = recipe.search.best(tmp_path, "inf", Namespace(budget=1, select="NLL"))
    assert first.number == 0 and recipe.search.at_edge(first, Namespace(**ranges)) == ["tau"]
    with pytest.raises(PosthocUQError, match="run the stage search first"):
        recipe.search.best(tmp_path, "diag", Namespace(budget=4, select="NLL"))


# Parts on a small network


def _small(seed: int = 0) -> TrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    return TrainedModel(model, "small", ImageTransform(lambda image: image, None, "none"), None)


def _batches(count: int = 6, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 5, 3, 2, 2, generator=generator)
    return list(zip(images, torch.randint(0, 3, (count, 5), generator=generator), strict=True))


def _options(folder: Path, **values: Any) -> Namespace:
    given = {
        "methods": ["inf"],
        "layers": "all",
        "rank": 4,
        "seed": 0,
        "checkpoint_every": 1,
        "progress": False,
    }
    given |= {"search_samples": 5, "bins": 10, "select": "NLL", "budget": 3}
    given |= {"scales": (10.0, 20.0), "priors": (1e14, 1e15)}
    return Namespace(posteriors=folder / "posteriors", trials=folder / "trials", **given | values)


class Failing:
    """A loader that breaks off after so many batches."""

    def __init__(self, batches: Sequence[Any], after: int) -> None:
        self._batches, self._left = batches, after

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self._left -= 1
            if self._left < 0:
                raise OSError("the disk is gone")
            yield batch


def test_an_interrupted_fit_goes_on(recipe: Namespace, tmp_path: Path) -> None:
    source, options = _small(), _options(tmp_path)
    with pytest.raises(OSError, match="the disk is gone"):
        recipe.fitting.fit_all(source, Failing(_batches(), 9), options)
    assert (options.posteriors / "inf.checkpoint").exists() and not (options.posteriors / "inf.h5").exists()
    # The first sweep and a part of the second are not read again: 12 batches in all, and one for the dry run.
    recipe.fitting.fit_all(source, Failing(_batches(), 12), options)
    recipe.fitting.fit_all(source, _batches(), whole := _options(tmp_path / "whole"))
    ours, theirs = (uq.load(o.posteriors / "inf.h5", source.model) for o in (options, whole))
    for name, block in theirs.blocks.items():
        assert torch.equal(block.dense(), ours.blocks[name].dense())


def test_a_trial_without_spread_is_the_network(recipe: Namespace, tmp_path: Path) -> None:
    source, options = _small(), _options(tmp_path)
    posterior = uq.fit(source.model, _batches(), rank=4, prior_precision=1.0, progress=False)
    batches = _batches(40, seed=2)
    labels = torch.cat([y for _, y in batches])
    found = recipe.search.tried(source, posterior, 0, batches, labels, options)
    with torch.no_grad():
        logits = torch.cat([source.model(x) for x, _ in batches]).double()
    assert pytest.approx(float(nn.functional.cross_entropy(logits, labels)), abs=1e-4) == found.NLL
    confidence, predicted = logits.softmax(1).max(1)
    hits = (predicted == labels).double()
    assert found.accuracy == pytest.approx(float(hits.mean()))
    cells = np.minimum((confidence.numpy() * 10).astype(int), 9)
    gaps = [abs(float((confidence - hits)[cells == b].sum())) for b in range(10)]
    assert pytest.approx(sum(gaps) / len(hits), abs=1e-4) == found.ECE
    assert options.scales[0] <= found.scale <= options.scales[1]


def test_a_trial_with_wild_weights_is_not_finite(recipe: Namespace, tmp_path: Path) -> None:
    source = _small()
    posterior = uq.fit(source.model, _batches(), rank=4, prior_precision=1.0, progress=False)
    options = _options(tmp_path, scales=(1e-30, 1e-29), priors=(1e-30, 1e-29))
    batches = [(1e30 * x, y) for x, y in _batches()]
    labels = torch.cat([y for _, y in batches])
    found = recipe.search.tried(source, posterior, 0, batches, labels, options)
    assert math.isinf(found.NLL) and math.isinf(found.ECE)


@pytest.mark.parametrize("size", [7, 9])
def test_parts_of_several_processes_are_joined_in_order(recipe: Namespace, tmp_path: Path, size: int) -> None:
    logits = torch.randn(4, size, 5, generator=torch.Generator().manual_seed(0))
    whole = ClassPrediction.from_logits(logits)
    files = [tmp_path / f"{r}.pt" for r in range(3)]
    for r, file in enumerate(files):
        part = ClassPrediction.from_logits(logits[:, r::3])
        torch.save({"test": {name: getattr(part, name) for name in recipe.evaluating.KEPT}}, file)
    found = recipe.evaluating.joined(files)["test"]
    for name in recipe.evaluating.KEPT:
        assert torch.equal(getattr(found, name), getattr(whole, name))


def test_figure6_shows_confidence_minus_accuracy(recipe: Namespace) -> None:
    generator = torch.Generator().manual_seed(0)
    probs = (3 * torch.randn(400, 4, generator=generator)).softmax(1)
    labels = torch.randint(0, 4, (400,), generator=generator)
    plain = ClassPrediction.from_logits(probs.log().unsqueeze(0))
    row = recipe.evaluating.summary("INF", {"test": plain}, labels, Namespace(bins=15))
    figure = recipe.figures.calibration_figure({"INF": row})
    line = figure.axes[0].lines[-1]
    order = np.argsort(plain.probs.max(1).values.numpy(), kind="stable")
    groups = np.array_split(order, 20)
    confidence = np.array([plain.probs.max(1).values.numpy()[g].mean() for g in groups])
    accuracy = np.array([(plain.predicted() == labels).numpy()[g].mean() for g in groups])
    assert np.allclose(line.get_xdata(), -np.log(np.clip(1 - confidence, 1e-4, None)), rtol=1e-3)
    assert np.allclose(line.get_ydata(), confidence - accuracy, atol=1e-5)


# The command line


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "--search-images"),
        ([], 2, "--model, --train and --val are needed"),
        (["--smoke", "--ood", "nowhere"], 2, "must be NAME=FOLDER"),
        (["--smoke", "--priors", "5", "1"], 2, "--priors must be two positive numbers"),
    ],
)
def test_usage(
    recipe: Namespace, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        recipe.run.main(arguments)
    printed = capsys.readouterr()
    assert raised.value.code == code and said in printed.out + printed.err


def test_errors_are_one_line(recipe: Namespace, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = ["--model", "torchvision:squeezenet1_1", "--val", tmp_path, "--output", tmp_path / "out"]
    weights = tmp_path / "weights.pt"
    import torchvision

    torch.save(torchvision.models.squeezenet1_1(weights=None).state_dict(), weights)
    (tmp_path / "train" / "n01440764").mkdir(parents=True)
    cases: list[tuple[list[Any], str]] = [
        (["--train", tmp_path / "none"], "has random weights"),
        (["--train", tmp_path / "none", "--weights", weights], "There is no folder"),
        (["--train", tmp_path / "train", "--weights", weights], "There are no images in the folder"),
    ]
    for number, (arguments, said) in enumerate(cases):
        model[-1] = tmp_path / f"out{number}"
        assert recipe.run.main([str(a) for a in (*model, *arguments)]) == 1
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Two classes of ImageNet, a flat folder of validation images, and arguments for a model with random weights."""
    import torchvision

    folder = tmp_path_factory.mktemp("small")
    torch.save(torchvision.models.squeezenet1_1(weights=None).state_dict(), folder / "w.pt")
    for number, name in enumerate(["train/n01440764", "train/n01443537", "flat", "flat", "flat", "ood"]):
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels = np.full((40, 40, 3), 40 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name / f"ILSVRC2012_val_{number:08}.png")
    given = ["--model", "torchvision:squeezenet1_1", "--weights", folder / "w.pt", "--image-size", "40"]
    more = ["--train", folder / "train", "--search-images", "1", "--workers", "0", "--layers", "last"]
    return folder, [str(each) for each in (*given, *more)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--val", "nowhere"], "There is no folder 'nowhere'"),
        (["--val", "flat"], "official list of labels"),
        (["--val", "flat", "--val-labels", "none.txt"], "'none.txt' cannot be read"),
        (["--val", "flat", "--val-labels", "short.txt"], "has 1 labels, and 'flat' 3 images"),
        (["--val", "flat", "--val-labels", "numbers.txt"], "development kit"),
        (["--val", "train", "--ood", "x=nowhere"], "There is no folder 'nowhere'"),
        (["--val", "train", "--class-map", "short.txt"], "lacks 1 of the class folders"),
        (["--val", "train", "--search-images", "2"], "leaves none to evaluate on"),
    ],
)
def test_what_a_run_needs_is_looked_at_before_the_first_fit(
    wrong: list[str],
    said: str,
    small: tuple[Path, list[str]],
    recipe: Namespace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """And a mistake leaves no settings, which the corrected run would be compared with."""
    folder, given = small
    monkeypatch.chdir(folder)
    Path("short.txt").write_text("n01440764\n")
    Path("numbers.txt").write_text("1\n2\n3\n")
    monkeypatch.setattr(recipe.fitting, "fit_all", lambda *_: pytest.fail("a fit began"))
    assert recipe.run.main([*given, "--output", str(tmp_path), *wrong]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "settings.json").exists() and not (tmp_path / "posteriors").exists()


def test_the_official_lists_of_labels(
    small: tuple[Path, list[str]], recipe: Namespace, tmp_path: Path
) -> None:
    from scipy.io import savemat

    folder, given = small
    kinds = np.dtype([("ILSVRC2012_ID", "O"), ("WNID", "O")])
    savemat(
        tmp_path / "meta.mat",
        {"synsets": np.array([(2, "n01440764"), (1, "n01443537"), (3, "n99999999")], kinds)},
    )
    lists = {
        "wnids.txt": "n01443537\nn01440764\nn01443537\n",
        "ILSVRC2012_validation_ground_truth.txt": "1\n2\n1\n",
        "LOC_val_solution.csv": "ImageId,PredictionString\n"
        "ILSVRC2012_val_00000003,n01440764 1 1 9 9\n"
        "ILSVRC2012_val_00000002,n01443537 1 1 9 9 n01443537 2 2 4 4\n"
        "ILSVRC2012_val_00000004,n01443537 1 1 9 9\n",
    }
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
        options = recipe.run.parsed(
            [
                *given,
                *["--val", str(folder / "flat"), "--val-labels", str(tmp_path / name)],
                "--output",
                str(tmp_path),
            ]
        )
        opened = recipe.run.Opened(options)
        assert list(opened.val.labels) == [1, 0, 1] and list(opened.train.labels) == [0, 1]


def test_settings_of_the_search_are_free_until_there_are_trials(recipe: Namespace, tmp_path: Path) -> None:
    def prepared(*more: str) -> Any:
        common = ["--model", "m", "--train", "t", "--output", str(tmp_path)]
        options = recipe.run.parsed([*common, *more])
        recipe.run.prepare(options)
        recipe.run.keep_settings(options)
        return options

    prepared("--val", "wrong")
    options = prepared("--val", "right")
    options.trials.mkdir()
    (options.trials / "diag").mkdir()
    with pytest.raises(PosthocUQError, match="made with --val right, not wrong"):
        prepared("--val", "wrong")
    with pytest.raises(PosthocUQError, match="made with --rank 100, not 7"):
        prepared("--val", "right", "--rank", "7")
