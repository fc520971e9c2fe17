"""What the commands do, beside the same work done by hand."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from cli_helpers import CLASSES, failure, make_place, net, run, run_json, tensors
from torch import nn

import posthoc_uq as uq
from posthoc_uq.cli.entry import commands
from posthoc_uq.cli.wording import in_options

RANK = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, a trained model and, in ``m.h5``, its posterior."""
    folder = make_place(tmp_path_factory.mktemp("commands"))
    fit(folder, "m.h5")
    return folder


@pytest.fixture
def copy(place: Path, tmp_path: Path) -> Path:
    """The posterior's file, to be changed."""
    (tmp_path / "m.h5").write_bytes((place / "m.h5").read_bytes())
    return tmp_path / "m.h5"


def model_options(place: Path) -> list[Any]:
    return ["--model", f"{place / 'nets.py'}:net", "--weights", place / "w.pt", "--workers", 0]


def fit(place: Path, name: str, *options: Any, data: str = "train") -> dict[str, Any]:
    common = ["--rank", RANK, "--prior-precision", 5.0, "-o", place / name]
    return run_json("fit", place / data, *model_options(place), *common, *options)


def trained(place: Path) -> nn.Module:
    model = net()
    model.load_state_dict(torch.load(place / "w.pt"))
    return model.eval()


def loader(place: Path, name: str, size: int = 32) -> list[Any]:
    x, y = tensors(place / name)
    return list(zip(x.split(size), y.split(size), strict=True))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows])


def assert_same_posterior(found: uq.Posterior, expected: uq.Posterior, tolerance: float = 0.0) -> None:
    assert found.blocks.keys() == expected.blocks.keys()
    for name, block in expected.blocks.items():
        difference = (found.blocks[name].dense() - block.dense()).norm() / block.dense().norm()
        assert float(difference) <= tolerance


class TestFit:
    def test_it_is_the_fit_of_the_library(self, place: Path) -> None:
        expected = uq.fit(
            trained(place), loader(place, "train"), rank=RANK, prior_precision=5.0, progress=False
        )
        found = uq.load(place / "m.h5", trained(place))
        assert_same_posterior(found, expected, 1e-6)
        assert found.prior_precision == 5.0 and found.scale == 36
        assert found.evidence.log_likelihood == pytest.approx(expected.evidence.log_likelihood)
        fitted = found.history.fit
        assert fitted["model"] == "nets.py:net" and fitted["images"] == "3 x own size"
        assert fitted["fisher"] == "exact" and fitted["fisher chosen"] == "auto"

    def test_options_reach_the_library(self, place: Path) -> None:
        options: dict[str, Any] = {"method": "kfac", "layers": ["4"], "fisher": "exact", "seed": 3}
        expected = uq.fit(
            trained(place), loader(place, "train"), dtype=torch.float64, progress=False, **options
        )
        said = run_json(
            *[
                "fit",
                place / "train",
                *model_options(place),
                "-o",
                place / "k.h5",
                "--method",
                "kfac",
                "--layers",
                "4",
            ],
            *[
                "--fisher",
                "exact",
                "--seed",
                3,
                "--dtype",
                "float64",
                "--save-dtype",
                "float32",
                "--compress",
            ],
        )
        found = uq.load(place / "k.h5", trained(place))
        assert found.method == "kfac" and list(found.layers) == ["4"]
        assert_same_posterior(found, expected, 1e-5)
        assert found.prior_precision == pytest.approx(expected.prior_precision, rel=1e-6)
        assert (
            said["report"]["summary"]["method"] == "kfac" and said["bytes"] == (place / "k.h5").stat().st_size
        )

    def test_a_flat_folder_has_labels_of_the_model(self, place: Path) -> None:
        said = fit(place, "flat.h5", data="flat")
        assert said["report"]["summary"]["samples"] == 5
        assert uq.load(place / "flat.h5", trained(place)).evidence.log_likelihood is None
        fit(place, "unlabelled.h5", "--unlabelled")
        found = uq.load(place / "unlabelled.h5", trained(place))
        assert found.evidence.log_likelihood is None and found.scale == 36
        assert "needs targets" in failure(
            *[
                "fit",
                place / "flat",
                *model_options(place),
                "-o",
                place / "x.h5",
                "--likelihood",
                "regression",
            ]
        )

    def test_held_out_data_tune_it(self, place: Path) -> None:
        fit(place, "tuned.h5", "--val-data", place / "val")
        found = uq.load(place / "tuned.h5", trained(place))
        how = found.history.tuning["prior precision"]
        assert how.startswith("the widest") and how.endswith("given up")
        assert found.history.head == {"name": "linearized", "options": {}, "criterion": "likelihood"}
        said = failure(
            *[
                "fit",
                place / "train",
                *model_options(place),
                "-o",
                place / "x.h5",
                "--val-data",
                place / "flat",
            ]
        )
        assert "Held-out data need labels" in said and not (place / "x.h5").exists()

    def test_a_summary_for_people(self, place: Path) -> None:
        text = run(
            "fit", place / "val", *model_options(place), "-o", place / "t.h5", "--method", "diag"
        ).stdout
        assert "method: diag" in text and "samples: 18" in text
        assert text.splitlines()[-1].startswith(f"Written to {place / 't.h5'} (")

    def test_options_that_a_method_does_not_take(self, place: Path) -> None:
        data = ["fit", place / "val", *model_options(place), "-o", place / "x.h5"]
        said = run(*data, "--method", "diag", "--rank", 3, code=2).stderr
        assert "--rank is for the method inf (--method inf), and this is diag" in said
        assert "Error: --rank must be a whole number" in run(*data, "--rank", -1, code=2).stderr

    @pytest.mark.slow
    def test_several_processes_fit_the_same(self, place: Path) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", "2", "-m", "posthoc_uq", "fit", place / "train"]
        command += [*model_options(place), "--batch-size", 5, "--rank", RANK, "--prior-precision", 5.0]
        command += ["--limit", 35, "-o", place / "two.h5", "--json"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, env=environment, timeout=240
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said = json.loads(done.stdout)
        assert "text" not in said
        assert said["processes"] == 2 and said["bytes"] == (place / "two.h5").stat().st_size
        fit(place, "one.h5", "--limit", 35)
        one, two = (uq.load(place / name, trained(place)) for name in ("one.h5", "two.h5"))
        assert two.scale == one.scale == 35
        assert_same_posterior(two, one, 1e-5)


class TestTune:
    def test_by_evidence(self, place: Path, copy: Path) -> None:
        said = run_json("tune", copy, *model_options(place), "--per-layer")
        expected = uq.load(place / "m.h5", trained(place))
        uq.tune(expected, per_layer=True)
        found = uq.load(copy, trained(place))
        assert found.prior_precision == pytest.approx(expected.prior_precision)
        assert said["hyperparameters"]["prior precision"] == "per layer"
        assert said["prior precision by layer"] == pytest.approx(expected.prior_precision)
        assert_same_posterior(found, expected)

    def test_by_held_out_data(self, place: Path, copy: Path) -> None:
        options = ["--search-draws", 4, "--max-evaluations", 3, "--parameter", "prior_precision", "--seed", 1]
        options += ["--head", "sampling", "--n-samples", 6]
        output = copy.with_name("other.h5")
        said = run_json(
            "tune", copy, *model_options(place), "--data", place / "val", *options, "--output", output
        )
        expected = uq.load(place / "m.h5", trained(place))
        trials = uq.tune(
            expected,
            loader(place, "val"),
            n_samples=4,
            max_evaluations=3,
            parameters=("prior_precision",),
            head="sampling",
            seed=1,
            progress=False,
        )
        assert uq.load(output, trained(place)).prior_precision == pytest.approx(expected.prior_precision)
        least = min(t.objective for t in trials.trials)
        assert said["given up"] == pytest.approx(trials.given_up, abs=1e-9)
        assert said["validation NLL"] == pytest.approx(least + said["given up"])
        head = {"name": "sampling", "options": {"n_samples": 6}, "criterion": "likelihood"}
        assert uq.load(output, trained(place)).history.head == head == said["searched through"]
        with torch.no_grad():
            x, y = tensors(place / "val")
            alone = nn.functional.cross_entropy(trained(place)(x), y)
        assert said["model alone"] == pytest.approx(float(alone), rel=1e-5)
        assert copy.read_bytes() == (place / "m.h5").read_bytes()

    def test_a_temperature(self, place: Path, copy: Path) -> None:
        said = run_json("tune", copy, *model_options(place), "--data", place / "val", "--parameter", "none")
        found = uq.load(copy, trained(place))
        assert found.temperature == said["hyperparameters"]["temperature"] != 1.0
        assert (
            found.history.tuning["temperature"].startswith("validation NLL") and found.prior_precision == 5.0
        )
        run("tune", copy, *model_options(place), "--data", place / "val", "--no-temperature")
        assert uq.load(copy, trained(place)).temperature == found.temperature

    def test_closeness_to_the_model_needs_no_labels(self, place: Path, copy: Path) -> None:
        options = [
            "--data",
            place / "flat",
            "--criterion",
            "faithful",
            "--divergence",
            0.02,
            "--no-temperature",
        ]
        options += ["--head", "moments", "--head-option", "relu=exact"]
        said = run_json("tune", copy, *model_options(place), *options)
        expected = uq.load(place / "m.h5", trained(place))
        assert uq.load(copy, trained(place)).prior_precision == said["hyperparameters"]["prior precision"]
        images = [flat(place)[0]]
        uq.tune(
            expected,
            images,
            criterion="faithful",
            divergence=0.02,
            temperature=False,
            head="moments",
            relu="exact",
            progress=False,
        )
        assert said["hyperparameters"]["prior precision"] == pytest.approx(expected.prior_precision)
        assert 0 < said["divergence"] <= said["budget"] == 0.02 and said["validation NLL"] is None
        assert said["searched through"]["options"] == {"relu": "exact"}
        text = run("inspect", copy).stdout
        assert "moments (relu exact)" in text and "of at most 0.02 nats" in text
        out = copy.with_suffix(".csv")
        found = run_json("predict", copy, place / "flat", *model_options(place), "-o", out)
        assert (found["head"]["head"], found["head"]["relu"]) == ("moments", "exact")

    def test_the_number_format_stays(self, place: Path) -> None:
        fit(place, "half.h5", "--save-dtype", "bfloat16")
        size = (place / "half.h5").stat().st_size
        run("tune", place / "half.h5", *model_options(place))
        assert abs((place / "half.h5").stat().st_size - size) < 1000

    def test_labels_are_needed_to_search(self, place: Path, copy: Path) -> None:
        said = failure("tune", copy, *model_options(place), "--data", place / "flat")
        assert "Tuning needs labels" in said
        options = ["--data", place / "flat", "--no-search", "--referral-rate", 0.4]
        said = run_json("tune", copy, *model_options(place), *options)
        assert said["score"] == ["entropy", "novelty"] == list(said["threshold"])
        assert min(said["threshold"].values()) > 0
        before = copy.read_bytes()
        said = failure("tune", copy, *model_options(place), "--data", place / "flat")
        assert said.count("\n") == 1 and copy.read_bytes() == before, "a failure voids no threshold"

    def test_the_moments_head_is_calibrated(self, place: Path, copy: Path) -> None:
        options = ["--data", place / "train", "--no-search", "--calibrate"]
        assert "give --head moments too" in failure("tune", copy, *model_options(place), *options)
        run("tune", copy, *model_options(place), *options, "--head", "moments")
        found = uq.wrap(trained(place), uq.load(copy, trained(place)), head="moments")
        assert found.calibration is not None and found.calibration.n_mc == 64

    def test_a_threshold_that_a_search_makes_void_is_said(self, place: Path, copy: Path) -> None:
        data = ["--data", place / "val", "--head", "sampling", "--n-samples", 4]
        run("tune", copy, *model_options(place), *data, "--no-search", "--referral-rate", 0.2)
        said = run("tune", copy, *model_options(place)).stderr
        assert said.count("no longer applies; set it again with --referral-rate") == 1
        assert said.count("threshold") == 1 and "set_referral" not in said, (
            "the command line's own way out alone"
        )
        again = run("tune", copy, *model_options(place), *data, "--no-search", "--referral-rate", 0.2)
        assert again.stderr == ""
        out = copy.with_suffix(".csv")
        run("tune", copy, *model_options(place), "--per-layer")
        result = run("predict", copy, place / "val", *model_options(place), "-o", out)
        assert "The column flag stays empty." in result.stderr
        assert {row["flag"] for row in table(out)} == {""}

    def test_a_new_calibration_makes_a_threshold_void_too(self, place: Path, copy: Path) -> None:
        moments = [*model_options(place), "--data", place / "val", "--no-search", "--head", "moments"]
        run("tune", copy, *moments, "--referral-rate", 0.2)
        assert "no longer applies" in run("tune", copy, *moments, "--calibrate").stderr
        assert run("tune", copy, *moments, "--referral-rate", 0.2).stderr == ""
        assert run("tune", copy, *moments, "--calibrate").stderr == "", "the same calibration again"


class TestPredict:
    def test_every_row_is_the_librarys(self, place: Path, copy: Path) -> None:
        rate = 0.25
        options = [*model_options(place), "--n-samples", 7, "--seed", 2]
        data = [
            "--data",
            place / "val",
            "--referral-rate",
            rate,
            "--referral-score",
            "entropy",
            "--no-search",
        ]
        threshold = run_json("tune", copy, *options, *data)["threshold"]
        out = copy.with_suffix(".csv")
        said = run_json(
            "predict",
            copy,
            place / "train",
            *options,
            "-o",
            out,
            "--batch-size",
            5,
            "--top-k",
            2,
            "--class-names",
            place / "train",
        )
        rows = table(out)
        assert said["rows"] == len(rows) == 36 and said["skipped"] == []
        assert list(rows[0]) == (
            "file label_1 probability_1 label_2 probability_2 entropy mutual_information novelty flag".split()
        )
        files = [row["file"] for row in rows]
        assert files == sorted(f"{name}/{i}.png" for name in CLASSES for i in range(12))

        # The draws' outputs by the library, all that follows from them by numpy.
        x, _ = tensors(place / "train")
        predictor = uq.wrap(trained(place), uq.load(copy, trained(place)), n_samples=7, seed=2)
        with torch.no_grad():
            logits = predictor.outputs(x).double().numpy()
        draws = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        probs = draws.mean(0)
        entropy = -(probs * np.log(probs)).sum(-1)
        information = entropy + (draws * np.log(draws)).sum(-1).mean(0)
        order = np.argsort(-probs, axis=1)
        assert [row["label_1"] for row in rows] == [CLASSES[i] for i in order[:, 0]]
        assert [row["label_2"] for row in rows] == [CLASSES[i] for i in order[:, 1]]
        assert column(rows, "probability_1") == pytest.approx(probs.max(1), rel=2e-5)
        assert column(rows, "entropy") == pytest.approx(entropy, rel=1e-4, abs=1e-6)
        assert column(rows, "mutual_information") == pytest.approx(information, rel=1e-2, abs=1e-5)
        assert column(rows, "novelty") == pytest.approx(predictor.novelty(x).numpy(), rel=1e-3)
        clear = np.abs(entropy - threshold) > 1e-5
        assert (column(rows, "flag")[clear] == (entropy > threshold)[clear]).all()
        assert said["flagged"] == column(rows, "flag").sum()

        run("predict", copy, place / "val", *options, "-o", out, "--force")
        assert column(table(out), "flag").sum() == math.floor(rate * 18)

    def test_heads_and_links(self, place: Path, copy: Path) -> None:
        out = copy.with_suffix(".csv")
        common = ["predict", copy, place / "flat", *model_options(place), "-o", out, "--force"]
        posterior = uq.load(copy, trained(place))
        x, _ = flat(place)
        for head, link, options in (
            ("linearized", "probit", {}),
            ("linearized", "mc", {"n_draws": 50}),
            ("moments", "bridge", {"relu": "exact"}),
        ):
            extra = [part for name, value in options.items() for part in ("--head-option", f"{name}={value}")]
            run(*common, "--head", head, "--link", link, *extra)
            expected = uq.wrap(trained(place), posterior, head=head, link=link, **options)(x)
            rows = table(out)
            assert column(rows, "probability_1") == pytest.approx(
                expected.probs.max(1).values.numpy(), rel=1e-4
            )
            if link == "mc":
                assert column(rows, "mutual_information") == pytest.approx(
                    expected.mutual_information().numpy(), rel=1e-2, abs=1e-5
                )
            else:
                assert {row["mutual_information"] for row in rows} == {""}
            assert {row["flag"] for row in rows} == {""} and {row["label_1"] for row in rows} <= set(CLASSES)
        common += ["--head", "sampling"]
        run(*common, "--head-option", "batched=False", "--n-samples", 3)
        said = failure(*common, "--head-option", "colour=1")
        assert "--head-option colour: the head sampling takes no such option; it takes n_samples, " in said
        assert "antithetic" in said
        assert "--link is for" in run(*common, "--link", "mc", code=2).stderr
        assert "--n-samples is for" in run(*common, "--head", "moments", "--n-samples", 3, code=2).stderr

    def test_the_head_of_the_threshold_is_the_default(self, place: Path, copy: Path) -> None:
        head = ["--head", "linearized", "--link", "mc", "--referral-score", "functional_variance"]
        data = ["--data", place / "val", "--no-search", "--referral-rate", 0.5]
        run("tune", copy, *model_options(place), *data, *head)
        out = copy.with_suffix(".csv")
        said = run_json("predict", copy, place / "val", *model_options(place), "-o", out)
        assert (said["head"]["head"], said["head"]["link"]) == ("linearized", "mc") and said["flagged"] == 9
        rows = table(out)
        flags = column(rows, "flag") == 1
        scores = column(rows, "functional_variance")
        assert scores[flags].min() > scores[~flags].max()
        result = run(
            "predict", copy, place / "val", *model_options(place), "-o", out, "--force", "--head", "sampling"
        )
        assert "The column flag stays empty." in result.stderr and result.stderr.count("\n") == 1

    def test_flags_by_several_scores_name_the_one(self, place: Path, copy: Path) -> None:
        head = ["--head", "linearized", "--link", "mc"]
        names = ["entropy", "functional_variance"]
        data = ["--data", place / "val", "--no-search", "--referral-rate", 0.4]
        said = run_json(
            "tune", copy, *model_options(place), *data, *head, "--referral-score", ", ".join(names)
        )
        thresholds = said["threshold"]
        assert said["score"] == names == list(thresholds)
        out = copy.with_suffix(".csv")
        summary = run_json("predict", copy, place / "val", *model_options(place), "-o", out)
        rows = table(out)
        assert (
            list(rows[0])[-7:]
            == "entropy mutual_information functional_variance novelty flag reason tail".split()
        )

        posterior = uq.load(copy, trained(place))
        predictor = uq.wrap(trained(place), posterior, "linearized", link="mc")
        x, _ = tensors(place / "val")
        with torch.no_grad():
            prediction = predictor(x)
            reasons = predictor.referral.reasons(prediction)
            tail = predictor.referral.tail(prediction)
        lists = zip(*(flags.tolist() for flags in reasons.values()), strict=True)
        named = ["+".join(n for n, flag in zip(reasons, flags, strict=True) if flag) for flags in lists]
        assert [row["reason"] for row in rows] == named
        assert column(rows, "tail") == pytest.approx(tail.numpy(), rel=1e-3, abs=1e-3)
        assert [row["flag"] for row in rows] == ["1" if name else "0" for name in named]
        assert 6 <= summary["flagged"] == sum(map(bool, named)) <= math.floor(0.4 * 18)
        assert "+".join(names) in named or set(names) <= set(named)

        text = run("inspect", copy).stdout
        rule = " or ".join(f"{name} above {thresholds[name]:.6g}" for name in names)
        assert f"{rule} (a share 0.4 of 18 inputs), head linearized" in text
        result = run(
            "predict", copy, place / "val", *model_options(place), "-o", out, "--force", "--head", "moments"
        )
        assert "The column flag stays empty." in result.stderr
        assert {(row["flag"], row["reason"], row["tail"]) for row in table(out)} == {("", "", "")}

    def test_the_draws_of_the_threshold_are_the_default(self, place: Path, copy: Path) -> None:
        data = ["--data", place / "val", "--no-search", "--referral-rate", 0.5]
        data += ["--head", "sampling", "--n-samples", 7, "--referral-score", "entropy"]
        run("tune", copy, *model_options(place), *data)
        said = run_json("predict", copy, place / "val", *model_options(place), "-o", copy.with_suffix(".csv"))
        assert said["head"]["n_samples"] == 7 and said["flagged"] == 9

    def test_names_of_the_classes(self, place: Path, copy: Path) -> None:
        names = copy.with_name("names.json")
        names.write_text('["felis, catus", "canis", "dromaius"]')
        out = copy.with_suffix(".csv")
        common = ["predict", copy, place / "flat", *model_options(place), "-o", out, "--n-samples", 2]
        run(*common, "--class-names", names, "--top-k", 9)
        for row in table(out):
            found = {row[f"label_{i}"] for i in (1, 2, 3)}
            assert found == {"felis, catus", "canis", "dromaius"} and "label_4" not in row

    def test_unreadable_images_are_left_out_on_request(self, place: Path, copy: Path) -> None:
        folder = copy.with_name("images")
        folder.mkdir()
        for number in range(3):
            (folder / f"{number}.png").write_bytes((place / "flat" / f"{number}.png").read_bytes())
        (folder / "1.png").write_bytes(b"x")
        out = copy.with_suffix(".csv")
        common = ["predict", copy, folder, *model_options(place), "-o", out, "--force", "--n-samples", 2]
        out.write_text("an older file")
        assert f"Unreadable image '{folder / '1.png'}'" in failure(*common)
        assert out.read_text() == "an older file"
        result = run(*common, "--skip-unreadable", code=3)
        assert result.stderr == f"Left out, unreadable: {folder / '1.png'}\n"
        assert [row["file"] for row in table(out)] == ["0.png", "2.png"]
        assert run_json(*common, "--skip-unreadable", code=3)["skipped"] == [str(folder / "1.png")]
        assert sorted(path.name for path in copy.parent.iterdir()) == ["images", "m.csv", "m.h5"]

    def test_where_no_image_can_be_read_that_is_said(self, place: Path, copy: Path) -> None:
        folder, out = copy.with_name("broken"), copy.with_suffix(".csv")
        folder.mkdir()
        for name in ("a.png", "b.png"):
            (folder / name).write_bytes(b"x")
        common = [*model_options(place), "-o", out, "--n-samples", 2, "--skip-unreadable", "--batch-size", 1]
        said = failure("predict", copy, folder / "a.png", *common)
        reason = "not in an image format that is read: BMP, JPEG, PNG, PPM, TIFF, WEBP."
        assert said == f"Error: The only image, '{folder / 'a.png'}', could not be read: {reason}\n"
        said = failure("predict", copy, folder, *common)
        first = f"The first, '{folder / 'a.png'}': {reason}"
        assert said == f"Error: None of the 2 images could be read. {first}\n" and not out.exists()

    def test_other_preparation_than_for_the_fit_is_said(self, place: Path, copy: Path) -> None:
        common = [
            "predict",
            copy,
            place / "flat",
            *model_options(place),
            "-o",
            copy.with_suffix(".csv"),
            "--force",
        ]
        said = run(*common, "--n-samples", 2, "--image-size", 10).stderr
        assert said.startswith("Warning: ") and "prepared as [3 x own size]" in said and said.count("\n") == 1
        assert run(*common, "--n-samples", 2).stderr == ""

    def test_workers_change_nothing(self, place: Path, copy: Path) -> None:
        texts: list[str] = []
        for workers in (0, 2):
            out = copy.with_name(f"{workers}.csv")
            options = ["--n-samples", 2, "--workers", workers, "--batch-size", 4]
            run("predict", copy, place / "val", *model_options(place)[:4], *options, "-o", out)
            texts.append(out.read_text())
        assert texts[0] == texts[1]


class TestRegression:
    def test_from_fit_to_intervals(self, place: Path, tmp_path: Path) -> None:
        code = place / "nets.py"
        line = ["--model", f"{code}:line", "--weights", place / "line.pt"]
        file, out = tmp_path / "line.h5", tmp_path / "out.csv"
        run("fit", f"{code}:points", *line, "-o", file, "--likelihood", "regression", "--method", "full")
        said = run_json("tune", file, *line, "--data", f"{code}:points", "--referral-rate", 0.1)
        assert said["score"] == ["standard_deviation", "novelty"] == list(said["threshold"])
        assert len(said["hyperparameters"]["noise variance"]) == 1
        assert uq.inspect(file)["tuning"]["noise variance"] == "validation NLL"
        kept = tmp_path / "kept.h5"
        run("fit", f"{code}:points", *line, "-o", kept, "--likelihood", "regression", "--method", "full")
        run("tune", kept, *line, "--data", f"{code}:points", "--no-noise")
        assert uq.inspect(kept)["tuning"]["noise variance"].startswith("mean squared residual")
        options = ["--head", "sampling", "--n-samples", 5, "--level", 0.5]
        said = run_json("predict", file, f"{code}:points", *line, "-o", out, *options)
        rows = table(out)
        columns = "file mean standard_deviation epistemic_sd lower upper novelty flag reason tail"
        assert list(rows[0]) == columns.split()
        assert [row["file"] for row in rows] == [str(i) for i in range(40)]
        x = torch.randn(40, 2, generator=torch.Generator().manual_seed(2))
        model = nn.Linear(2, 1)
        model.load_state_dict(torch.load(place / "line.pt"))
        posterior = uq.load(file, model)
        with torch.no_grad():
            draws = uq.wrap(model, posterior, "sampling", n_samples=5).outputs(x).double().numpy()[..., 0]
        variance = draws.var(0, ddof=1)
        deviation = np.sqrt(variance + float(posterior.noise_variance))
        assert column(rows, "mean") == pytest.approx(draws.mean(0), rel=1e-3, abs=1e-4)
        assert column(rows, "epistemic_sd") == pytest.approx(np.sqrt(variance), rel=1e-3)
        assert column(rows, "standard_deviation") == pytest.approx(deviation, rel=1e-4)
        half = 0.6744897501960817 * deviation  # the upper quartile of a standard normal
        assert column(rows, "upper") - column(rows, "mean") == pytest.approx(half, rel=1e-3, abs=1e-4)
        assert column(rows, "mean") - column(rows, "lower") == pytest.approx(half, rel=1e-3, abs=1e-4)
        both = ["--referral-rate", 0.1, "--referral-score", "standard_deviation,epistemic_variance"]
        run("tune", file, *line, "--data", f"{code}:points", "--no-search", *both, "--n-samples", 5)
        assert (
            run_json(
                "predict", file, f"{code}:points", *line, "-o", out, "--force", *options, "--split", "val"
            )["flagged"]
            <= 4
        )
        assert list(table(out)[0])[-3:] == ["flag", "reason", "tail"]
        assert {row["reason"] for row in table(out) if row["flag"] == "0"} == {""}
        text = run("inspect", file).stdout
        assert "gaussian" in text.lower() or "regression" in text
        assert "noise variance" in text and "dense" in text


class TestEvaluate:
    def test_numbers_and_files(self, place: Path, copy: Path) -> None:
        files = {name: copy.with_name(name) for name in ("report.html", "rows.csv", "all.json")}
        said = run_json(
            *["evaluate", copy, place / "val", *model_options(place), "--n-samples", 6, "--batch-size", 4],
            *["--ood", f"noise={place / 'flat'}", "--ood", f"more={place / 'train'}"],
            *["--report", files["report.html"], "--csv", files["rows.csv"], "--json-file", files["all.json"]],
        )
        x, y = tensors(place / "val")
        with torch.no_grad():
            plain = trained(place)(x).double()
        alone = said["quality"]["model alone"]
        assert alone["accuracy"] == pytest.approx(float((plain.argmax(1) == y).double().mean()))
        assert alone["NLL"] == pytest.approx(float(nn.functional.cross_entropy(plain, y)), rel=1e-5)
        predictor = uq.wrap(trained(place), uq.load(copy, trained(place)), n_samples=6)
        with torch.no_grad():
            probs = predictor.outputs(x).double().softmax(-1).mean(0)
        expected = float(nn.functional.nll_loss(probs.log(), y))
        assert said["quality"]["inf, sampling"]["NLL"] == pytest.approx(expected, rel=1e-5)
        assert said["foreign"]["inf, sampling"].keys() == {"noise", "more"}
        assert said["inputs"] == {"test": 18, "noise": 5, "more": 36}
        assert said["threshold"] is None and said["written"] == [str(path) for path in files.values()]
        written = json.loads(files["all.json"].read_text())
        assert written["quality"] == said["quality"]
        assert {row["model"] for row in table(files["rows.csv"])} == {"model alone", "inf, sampling"}
        page = files["report.html"].read_text()
        assert page.lstrip().lower().startswith("<!doctype html") and "data:image/" in page
        assert copy.read_bytes() == (place / "m.h5").read_bytes()

    def test_a_table_and_a_threshold(self, place: Path, copy: Path) -> None:
        options = [*model_options(place), "--n-samples", 6]
        result = run("evaluate", copy, place / "val", *options, "--referral-rate", 0.3)
        assert "model alone" in result.stdout and "inf, sampling" in result.stdout
        assert f"kept in {copy}" in result.stdout
        out = copy.with_suffix(".csv")
        said = run_json("predict", copy, place / "val", *options, "-o", out)
        assert math.floor(0.3 * 18) - 1 <= said["flagged"] <= math.floor(0.3 * 18), (
            "by entropy and novelty together"
        )
        assert {reason for row in table(out) for reason in row["reason"].split("+")} <= {
            "",
            "entropy",
            "novelty",
        }

    def test_a_table_and_thresholds_on_two_scores(self, place: Path, copy: Path) -> None:
        options = [*model_options(place), "--n-samples", 6, "--ood", f"noise={place / 'flat'}"]
        scores = ["--referral-rate", 0.3, "--referral-score", "entropy,mutual_information"]
        page = copy.with_suffix(".html")
        result = run("evaluate", copy, place / "val", *options, *scores, "--report", page)
        referral = uq.load(copy, trained(place)).history.referral
        entropy, information = (own["threshold"] for own in referral["scores"].values())
        rule = f"entropy above {entropy:.6g} or mutual_information above {information:.6g}"
        assert f"referral: {rule}; kept in {copy}" in result.stdout
        assert "entropy and mutual_information" in result.stdout and "by mutual_information" in result.stdout
        assert "Referred by the thresholds" in page.read_text() and "referred by " in page.read_text()
        said = run_json("evaluate", copy, place / "val", *options, *scores)
        assert said["threshold"] == {"entropy": entropy, "mutual_information": information}
        assert said["score"] == ["entropy", "mutual_information"] and said["rule"] == rule
        assert "entropy and mutual_information" in said["foreign"]["inf, sampling"]["noise"]

    def test_labels_are_needed(self, place: Path, copy: Path) -> None:
        said = failure("evaluate", copy, place / "flat", *model_options(place))
        assert "An evaluation needs labels" in said
        said = failure("evaluate", copy, place / "val", *model_options(place), "--ood", f"x={place / 'gone'}")
        assert f"There is no folder '{place / 'gone'}'" in said


@pytest.mark.parametrize("train_mean", [True, False])
def test_a_function_space_posterior_goes_through_every_command_on_a_file(
    place: Path, tmp_path: Path, train_mean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file, out = trained(place), tmp_path / "f.h5", tmp_path / "f.csv"
    settings: dict[str, Any] = {
        "epochs": 2,
        "n_context": 6,
        "lr": 1e-2,
        "log_variance_lr": 0.1,
        "train_mean": train_mean,
    }
    data = loader(place, "train", 12)
    posterior = uq.fit(model, data, method="function_space", progress=False, **settings)
    uq.save(posterior, file)
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = ["--model", "nets:net", "--weights", place / "w.pt", "--workers", 0]
    search = ["--data", place / "val", "--search-draws", 4, "--max-evaluations", 3, "--n-samples", 6]
    said = run_json("tune", file, *options, *search, "--referral-rate", 0.25)
    posterior.scale = said["hyperparameters"]["scale"]
    posterior.temperature = said["hyperparameters"]["temperature"]
    assert uq.load(file, model).scale == posterior.scale and min(said["threshold"].values()) > 0

    said = run_json("predict", file, place / "val", *options, "-o", out)
    x, y = tensors(place / "val")
    with torch.no_grad():
        probs = uq.wrap(model, posterior, "sampling", n_samples=6).outputs(x).double().softmax(-1).mean(0)
    assert column(table(out), "probability_1") == pytest.approx(probs.max(1).values.numpy(), rel=1e-4)
    assert said["flagged"] == math.floor(0.25 * 18)
    said = run_json("evaluate", file, place / "val", *options, "--ood", f"noise={place / 'flat'}")
    expected = float(nn.functional.nll_loss(probs.log(), y))
    assert said["quality"]["function_space, sampling"]["NLL"] == pytest.approx(expected, rel=1e-4)
    text = run("inspect", file).stdout
    assert "function_space" in text and "fit, epochs" in text and "n_samples 6" in text
    assert "method='function_space' has no log marginal likelihood" in failure("tune", file, *options)


@pytest.mark.study
def test_the_throughput_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
        script = __import__("predict_throughput")
    path = tmp_path / "rows.json"
    script.main(["--smoke", "--json", str(path)])
    assert "median share" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["rows"]
    assert 0 < row["predict, s"] < row["command, s"]
    expected = row["bare, ms an image"] / 1e3 * row["draws"] * row["images"] / row["predict, s"]
    assert row["share"] == pytest.approx(expected) and row["share, CPU"] > 0


def flat(place: Path) -> tuple[torch.Tensor, list[str]]:
    """The images without classes, as the model gets them."""
    from PIL import Image

    files = sorted((place / "flat").iterdir())
    arrays = np.stack([np.asarray(Image.open(path)).astype(np.float32) / 255 for path in files])
    return torch.from_numpy(arrays).permute(0, 3, 1, 2), [path.name for path in files]


class TestUpdateAndForget:
    def test_they_are_those_of_the_library(self, place: Path, tmp_path: Path) -> None:
        file, options = tmp_path / "m.h5", model_options(place)
        common = ["--method", "diag", "--prior-precision", 5.0, "--fisher", "exact"]
        run("fit", place / "train", *options, *common, "-o", file)
        model = trained(place)
        both = [*loader(place, "train"), *loader(place, "val")]
        kwargs: dict[str, Any] = {"fisher": "exact", "prior_precision": 5.0, "progress": False}
        told = run("update", file, place / "val", *options).stdout
        assert "Added 18 samples; the posterior has 54 now." in told and f"Written to {file}." in told
        updated = uq.load(file, model)
        assert_same_posterior(updated, uq.fit(model, both, "diag", **kwargs), 1e-5)
        assert updated.prior_precision == 5.0 and updated.scale == 54
        out = tmp_path / "less.h5"
        summary = run_json("update", "--remove", file, place / "train", *options, "-o", out)
        assert (summary["changed"], summary["samples"], summary["output"]) == (36, 18, str(out))
        assert summary["changes"]["removed"] == 36
        assert uq.load(file, model).evidence.samples == 54
        assert_same_posterior(
            uq.load(out, model), uq.fit(model, loader(place, "val"), "diag", **kwargs), 1e-4
        )
        assert "1 update added 18 samples, 1 removal took out 36 samples" in run("inspect", out).stdout

    def test_a_refusal_leaves_the_file(self, place: Path, copy: Path) -> None:
        before = copy.read_bytes()
        assert "leaves none" in failure("update", "--remove", copy, place / "train", *model_options(place))
        assert "There is no folder" in failure("update", copy, place / "nowhere", *model_options(place))
        assert "does not exist" in failure("update", place / "no.h5", place / "val", *model_options(place))
        assert copy.read_bytes() == before

    def test_kfac_needs_its_grams(self, place: Path, tmp_path: Path) -> None:
        file, options = tmp_path / "m.h5", model_options(place)
        run("fit", place / "train", *options, "--method", "kfac", "-o", file)
        assert "keep_grams=True" in failure("update", file, place / "val", *options)
        run("fit", place / "train", *options, "--method", "kfac", "--keep-grams", "-o", file, "--force")
        run("tune", file, *options, "--data", place / "val", "--no-search", "--referral-rate", 0.1)
        told = run("update", file, place / "val", *options)
        assert "The referral threshold" in told.stderr and "is cleared" in told.stderr

    def test_a_half_file_becomes_whole(self, place: Path, tmp_path: Path) -> None:
        """A few samples among many are less than bfloat16 resolves."""
        file, options = tmp_path / "m.h5", model_options(place)
        run("fit", place / "train", *options, "--method", "diag", "--save-dtype", "bfloat16", "-o", file)
        run("update", file, place / "val", *options)
        formats = {t["dtype"] for b in uq.inspect(file)["blocks"].values() for t in b["tensors"].values()}
        assert formats == {"float32"}


def test_images_are_prepared_and_named_as_for_the_fit(place: Path, tmp_path: Path) -> None:
    path, asked = tmp_path / "sized.h5", ["--image-size", 12, "--mean", "0.4", "--std", "0.5"]
    run_json("fit", place / "train", *model_options(place), *asked, "--prior-precision", 5, "-o", path)
    facts = uq.load(path, trained(place)).history.fit
    assert (facts["image size"], facts["image mean"], facts["image std"]) == (12, [0.4], [0.5])
    assert facts["class names"] == sorted(item.name for item in (place / "train").iterdir())
    tables = []
    for options in ([], asked, ["--image-size", 16]):
        output = tmp_path / "out.csv"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            said = run(
                "predict", path, place / "flat", *model_options(place), *options, "-o", output, "--force"
            )
        warned = "was fitted on images prepared as [3 x 12 x 12" in said.stderr or bool(caught)
        assert warned == (options == ["--image-size", 16])
        tables.append(output.read_text())
    assert tables[0] == tables[1] != tables[2]
    assert {row["label_1"] for row in table(tmp_path / "out.csv")} <= set(facts["class names"])


def test_messages_name_options_of_the_command(place: Path) -> None:
    context = click.Context(commands.commands["fit"])
    said = "pass likelihood=uq.Categorical(..., class_dim=-1), or fisher='mc', batch_to_targets=lambda batch: ..."
    assert in_options(said, context) == (
        "pass --likelihood classification --likelihood-option class_dim=-1, or --fisher mc, "
        "batch_to_targets=lambda batch: ..."
    )
    assert (
        in_options("likelihood=uq.Mine(), layers='last' (colour=3).", context)
        == "likelihood=uq.Mine(), --layers last (colour=3)."
    )
    assert in_options(said, click.Context(commands.commands["inspect"])) == said
