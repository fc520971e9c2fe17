"""`evaluate`: numbers against scikit-learn and plain arithmetic, files and the report."""

from __future__ import annotations

import base64
import csv
import json
import re
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn

import posthoc_uq as uq
from posthoc_uq.app.page import _table
from posthoc_uq.evaluation.measurements import meanings, title_of
from posthoc_uq.likelihoods import SCORES


@pytest.fixture(scope="module")
def images():
    """A trained classifier of small images, its posterior, data like those of the training, and foreign ones."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(7, 1, 6, 6, generator=generator)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(0, 7, (count,), generator=generator)
        return patterns[labels] + 1.1 * torch.randn(count, 1, 6, 6, generator=generator), labels

    x, y = draw(300)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 7))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    posterior = uq.fit(model, [(x, y)], prior_precision=30.0, progress=False)
    test = draw(230)
    return model, posterior, test, 2.5 * torch.randn(90, 1, 6, 6, generator=generator)


def loader_of(x, y=None, size=64):
    return list(x.split(size)) if y is None else list(zip(x.split(size), y.split(size), strict=True))


@pytest.fixture(scope="module")
def compared(images):
    model, posterior, (x, y), foreign = images
    predictor = uq.wrap(model, posterior, n_samples=12)
    evaluation = uq.evaluate(
        {"network": model, "INF": predictor},
        loader_of(x, y),
        ood_loaders={"noise": loader_of(foreign)},
        class_names=[f"<{letter}>" for letter in "abcdefg"],
        progress=False,
    )
    return evaluation, predictor


class TestNumbers:
    def test_by_hand(self, images, compared):
        model, _, (x, y), foreign = images
        evaluation, predictor = compared
        with torch.no_grad():
            inside, outside, alone = predictor(x), predictor(foreign), model(x).double().softmax(-1)
        found, plain = evaluation.metrics["INF"], evaluation.metrics["network"]
        assert found == pytest.approx(inside.quality(y), abs=1e-6)
        assert plain["nll"] == pytest.approx(float(-alone[range(230), y].log().mean()), abs=1e-5)
        top = np.argsort(-alone.numpy(), axis=1)[:, :5]
        assert plain["top5_accuracy"] == pytest.approx(np.mean([y[i] in top[i] for i in range(230)]))
        truth = np.r_[np.zeros(230), np.ones(90)]
        for score, values in inside.scores().items():
            joined = np.r_[values.numpy(), outside.scores()[score].numpy()]
            numbers = evaluation.foreign["INF"]["noise"][score]
            assert numbers["auroc"] == pytest.approx(roc_auc_score(truth, joined), abs=1e-5)
            assert numbers["aupr"] == pytest.approx(average_precision_score(truth, joined), abs=1e-5)
        right = (inside.predicted() == y).numpy()
        order = np.argsort(inside.entropy().numpy(), kind="stable")
        for rate in evaluation.referral_rates:
            kept = order[: 230 - int(rate * 230)]
            accuracy = evaluation.selective["INF"]["entropy"][f"accuracy_referred_{100 * rate:g}"]
            assert accuracy == pytest.approx(right[kept].mean(), abs=1e-6)
        # a plain model has no epistemic scores
        assert set(evaluation.foreign["network"]["noise"]) == {"entropy", "max_probability"}
        assert set(evaluation.selective["network"]) == {"entropy", "max_probability"}

    def test_batches_and_order_change_nothing(self, images, compared):
        model, _, (x, y), foreign = images
        evaluation, predictor = compared
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
        again = uq.evaluate(
            {"network": model, "INF": predictor},
            loader_of(x[order], y[order], 17),
            ood_loaders={"noise": loader_of(foreign, size=9)},
            progress=False,
        )
        for name, values in evaluation.metrics.items():
            assert again.metrics[name] == pytest.approx(values, abs=1e-5)
        assert again.foreign["INF"]["noise"]["entropy"] == pytest.approx(
            evaluation.foreign["INF"]["noise"]["entropy"], abs=1e-6
        )

    def test_regression(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(120, 3, generator=generator)
        y = x.sum(1, keepdim=True) + 0.3 * torch.randn(120, 1, generator=generator)
        model = nn.Linear(3, 1)
        nn.init.constant_(model.weight, 0.9)
        posterior = uq.fit(model, [(x, y)], likelihood="regression", progress=False)
        predictor = uq.wrap(model, posterior, "linearized")
        evaluation = uq.evaluate(
            {"model": model, "INF": predictor}, loader_of(x, y), ood_loaders=loader_of(9 * x), progress=False
        )
        with torch.no_grad():
            prediction = predictor(x)
        density = torch.distributions.Normal(prediction.mean, prediction.standard_deviation).log_prob(y)
        assert evaluation.metrics["INF"]["log_density"] == pytest.approx(float(density.mean()), abs=1e-5)
        assert evaluation.metrics["INF"]["rmse"] == pytest.approx(
            float((prediction.mean - y).square().mean().sqrt()), abs=1e-6
        )
        assert evaluation.foreign["INF"]["foreign"]["standard_deviation"]["auroc"] > 0.8
        assert "standard_deviation" not in evaluation.foreign["model"]["foreign"]
        assert set(evaluation.figures()) == {
            "Coverage of intervals",
            "Familiar and foreign inputs",
            "Risk over coverage",
        }
        alone = uq.evaluate(
            model, loader_of(x, y), ood_loaders=loader_of(9 * x), likelihood="regression", progress=False
        )
        assert alone.figures() == {}  # nothing varies between inputs
        assert evaluation.threshold(0.1) == pytest.approx(
            float(prediction.standard_deviation.flatten().sort().values[-13]), rel=1e-5
        )

    def test_the_noise_of_a_plain_regression(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(80, 2, generator=generator)
        y = 5 * torch.randn(80, 1, generator=generator)
        model = nn.Linear(2, 1)
        posterior = uq.fit(model, [(x, y)], likelihood="regression", progress=False)
        both = {"model": model, "INF": uq.wrap(model, posterior, "linearized")}
        silent = uq.evaluate(both, [(x, y)], progress=False).metrics["model"]
        named = uq.evaluate(both, [(x, y)], likelihood="regression", progress=False).metrics["model"]
        with torch.no_grad():
            density = torch.distributions.Normal(model(x), posterior.noise_variance.sqrt()).log_prob(y)
        assert named == silent and named["log_density"] == pytest.approx(float(density.mean()), abs=1e-5)
        alone = uq.evaluate(model, [(x, y)], likelihood="regression", progress=False).metrics["model"]
        assert set(alone) == {"rmse"}


class TestWhatItTakes:
    def test_a_function_and_an_ensemble(self, images):
        model, _, (x, y), _ = images

        def ensemble(batch):
            with torch.no_grad():
                return uq.ClassPrediction.from_logits(torch.stack([model(batch), 0.5 * model(batch)]))

        evaluation = uq.evaluate({"two": ensemble, "one": model.forward}, loader_of(x, y), progress=False)
        assert "mutual_information" in evaluation.selective["two"]
        assert evaluation.names == ["two", "one"]

    def test_the_model_is_left_alone(self, images):
        _, _, (x, y), _ = images
        twin = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Dropout(0.5), nn.Linear(36, 7))
        before = {name: value.clone() for name, value in twin.state_dict().items()}
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        first = uq.evaluate(twin, loader_of(x, y), progress=False)
        assert torch.equal(torch.rand(3), expected)
        assert twin.training and all(torch.equal(before[k], v) for k, v in twin.state_dict().items())
        assert first.metrics == uq.evaluate(twin, loader_of(x, y), progress=False).metrics

    def test_binary(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(150, 2, generator=generator)
        y = (x[:, 0] + 0.5 * torch.randn(150, generator=generator) > 0).float()
        model = nn.Linear(2, 1)
        posterior = uq.fit(model, [(x, y)], likelihood="binary", prior_precision=1.0, progress=False)
        evaluation = uq.evaluate(uq.wrap(model, posterior), loader_of(x, y), progress=False)
        assert evaluation.names == ["linearized"]
        assert "auc_referred_50" in evaluation.selective["linearized"]["entropy"]
        assert "top5_accuracy" not in evaluation.metrics["linearized"]


class TestFiles:
    def test_csv_json_and_text_agree(self, compared, tmp_path):
        evaluation, _ = compared
        evaluation.to_csv(tmp_path / "e.csv")
        evaluation.to_json(tmp_path / "e.json")
        with (tmp_path / "e.csv").open() as file:
            rows = list(csv.DictReader(file))
        kept = json.loads((tmp_path / "e.json").read_text())
        by_key = {(r["model"], r["data"], r["score"], r["measure"]): float(r["value"]) for r in rows}
        assert (
            by_key["INF", "test", "", "nll"]
            == kept["quality"]["INF"]["nll"]
            == evaluation.metrics["INF"]["nll"]
        )
        assert (
            by_key["INF", "noise", "entropy", "auroc"] == kept["foreign"]["INF"]["noise"]["entropy"]["auroc"]
        )
        assert kept["inputs"] == {"test": 230, "noise": 90}
        assert kept["thresholds"]["INF"]["entropy"]["0.1"] == evaluation.threshold(0.1)
        assert f"{evaluation.metrics['INF']['nll']:.4f}" in str(evaluation)

    def test_a_file_that_cannot_be_written_leaves_the_old_one(self, compared, tmp_path, monkeypatch):
        def full(_):
            raise OSError(28, "No space left on device")

        evaluation, _ = compared
        with pytest.raises(uq.PosthocUQError, match="does not exist"):
            evaluation.to_csv(tmp_path / "missing" / "e.csv")
        (tmp_path / "old").write_text("old")
        monkeypatch.setattr("os.fsync", full)
        monkeypatch.setattr("posthoc_uq.app.page.html", lambda *_: "new")
        for write in (evaluation.to_csv, evaluation.to_json, evaluation.report):
            with pytest.raises(uq.PosthocUQError, match=r"No space left on device\. The file that was there"):
                write(tmp_path / "old")
        assert [path.name for path in tmp_path.iterdir()] == ["old"]
        assert (tmp_path / "old").read_text() == "old"

    @pytest.fixture(scope="class")
    def page(self, compared, tmp_path_factory):
        return compared[0].report(tmp_path_factory.mktemp("page") / "report.html", title="A & B").read_text()

    def test_the_report_stands_alone(self, compared, page):
        evaluation, _ = compared
        parser = _Page()
        parser.feed(page)
        assert parser.open == [] and parser.headings[0] == "A & B"
        assert "http" not in page and "<script" not in page and "prefers-color-scheme: dark" in page
        assert all(source.startswith("data:image/png;base64,") for source in parser.images)
        shown = [Image.open(BytesIO(base64.b64decode(s.split(",")[1]))) for s in parser.images]
        assert all(picture.size == (6, 6) for picture in shown)
        assert len(shown) == sum(map(len, evaluation.galleries.values()))
        assert "<b>&lt;" in page and "<a>" not in page  # class names are text, not markup

    def test_the_report_s_contents_come_first_and_its_details_are_folded(self, page):
        parser = _Page()
        parser.feed(page)
        assert parser.linked == parser.headings[1:] and page.index("<nav") < page.index("<h2")
        assert [f"#{name}" for name in parser.ids if name.startswith("part-")] == parser.links
        ahead = ["Quality on 230 test inputs", "Reliability", "Telling noise from the test inputs"]
        assert parser.headings[1:4] == ahead and parser.headings[4] == "Familiar and foreign inputs"
        plain = re.sub("<details>.*?</details>", "", page, flags=re.S)
        assert (
            "variation ratio" in page and "variation ratio" not in plain and '<td class="t">entropy' in plain
        )
        assert plain.count('<div class="card">') == 18 and page.count('<div class="card">') == 36
        assert "accuracy, 5 % referred" in plain and "1 minus the largest probability" in page

    def test_the_report_s_figures_are_drawn_in_the_page_s_colours(self, page):
        parser = _Page()
        parser.feed(page)
        panels = [name for name in parser.drawn if ", " in name]  # of a score; reliability has one a model
        assert len(parser.drawn) == len(set(parser.drawn)) and len(panels) == 5
        assert {"entropy, network", "entropy, INF", "mutual information, INF"} < set(panels)
        assert len(parser.ids) == len(set(parser.ids)) and parser.used <= {f"#{name}" for name in parser.ids}
        drawings = "".join(re.findall("<svg.*?</svg>", page, flags=re.S))
        assert not re.search("#[0-9a-f]{6}", drawings) and "<style" not in drawings and "<!--" not in drawings
        assert "var(--series-1)" in drawings and "var(--text)" in drawings

    def test_what_is_best_is_judged_as_it_is_shown(self):
        header = ["model", "nll", "rmse", "mean_entropy"]
        rows = [["a", 0.50001, 12345.6, 1.0], ["b", 0.50002, 12345.7, 2.0], ["c", 0.6, 4.0, 3.0]]
        page = _table(header, rows)
        assert page.count('class="n best">0.5000<') == 2 and '<td class="n">12346<' in page
        assert page.count("best") == 3 and 'class="n best">4<' in page
        assert "best" not in _table(header, rows[:1])

    def test_every_score_and_measure_is_explained(self, compared):
        evaluation, _ = compared
        measures = {name for by_row in evaluation.metrics.values() for name in by_row}
        measures |= {name for by_row in evaluation.selective.values() for m in by_row.values() for name in m}
        names = [*SCORES, *measures, "auroc", "aupr", "fpr95", "coverage_95"]
        explained = meanings(names)
        plain = (re.sub(r"(_referred)?(_\d+)+$", "", name) for name in names)
        assert all(title_of(name) in explained for name in plain)
        assert title_of("rmse_referred_5") == "RMSE, 5 % referred" and meanings(["my_own_measure"]) == {}
        assert title_of("coverage_97_5") == "coverage of 97.5 %" and title_of("my_own_9") == "my own 9"

    def test_galleries_hold_the_extremes(self, images, compared):
        _, _, (x, y), foreign = images
        evaluation, predictor = compared
        with torch.no_grad():
            entropy, wrong = predictor(x).entropy(), predictor(x).predicted() != y
            outside = predictor(foreign).entropy()
        uncertain = [example.index for example in evaluation.galleries["most uncertain"]]
        assert sorted(uncertain) == sorted(entropy.topk(12).indices.tolist())
        mistakes = [example.index for example in evaluation.galleries["surest mistakes"]]
        expected = wrong.nonzero().flatten()[entropy[wrong].argsort()[:12]].tolist()
        assert mistakes == expected
        sure = [example.index for example in evaluation.galleries["noise: least uncertain"]]
        assert sorted(sure) == sorted((-outside).topk(12).indices.tolist())
        example = evaluation.galleries["surest mistakes"][0]
        assert torch.equal(example.image, x[example.index]) and example.label == int(y[example.index])


def test_what_the_held_out_scores_refer_is_shown(images, tmp_path):
    model, fitted, (x, y), foreign = images
    posterior = uq.calibrate(fitted, loader_of(x[:130], y[:130]), progress=False)
    predictor, referral = uq.wrap(model, posterior), uq.Referral(0.2)
    kwargs = {"ood_loaders": {"noise": loader_of(foreign)}, "progress": False, "n_examples": 30}
    evaluation = uq.evaluate(
        {"network": model, "INF": predictor}, loader_of(x[130:], y[130:]), referral=referral, **kwargs
    )
    header, rows = evaluation.tables()["Leaving the least certain inputs to a person"]
    assert header[:3] == ["model", "score", "large_where"]
    assert {row[2] for row in rows if row[1] == "entropy"} == {"an error is likely"}
    of_errors = {"entropy", "mutual_information", "max_probability", "variation_ratio"}
    assert {row[1] for row in rows if row[0] == "INF"} == of_errors
    assert {"novelty", "epistemic_variance"} < {*evaluation.selective["INF"]}  # which are not about errors
    by_data = evaluation.referral_reasons()
    assert list(by_data) == ["test", "noise"] and evaluation.referral_reasons("network") == {}
    title = "Referred by the held-out scores, Referral(rate=0.2, score='joint')"
    header, rows = evaluation.tables()[title]
    assert header == [
        *(
            "model",
            "data",
            "referred",
            "by_entropy",
            "by_novelty",
            "accuracy_of_rest",
            "mistakes_referred",
        )
    ]
    for (data, reasons), row in zip(by_data.items(), rows, strict=True):
        entropy, novelty = reasons["entropy"], reasons["novelty"]
        expected = [float(flags.double().mean()) for flags in (entropy | novelty, entropy, novelty)]
        assert row[:2] == ["INF", data] and row[2:5] == pytest.approx(expected)
    prediction = predictor(x[130:])
    flags, wrong = referral(prediction), prediction.predicted() != y[130:]
    assert rows[0][5] == pytest.approx(float((~wrong[~flags]).double().mean()))
    assert rows[0][6] == pytest.approx(float(flags[wrong].double().mean())) and rows[1][5:] == [None, None]
    assert evaluation.to_dict()["referred"][1]["referred"] == rows[1][2]
    page = evaluation.report(tmp_path / "r.html").read_text()
    assert "Referred by the held-out scores" in page and "several may refer one input" in page
    shown = [example for examples in evaluation.galleries.values() for example in examples]
    lines = [" and ".join(name for name in by_data[e.data] if by_data[e.data][name][e.index]) for e in shown]
    assert len(set(lines)) > 1 and {e.data for e in shown} == {"test", "noise"}
    assert re.findall(r"referred by ([a-z ]+)</div>", page) == [line for line in lines if line]
    for referral, word in ((uq.Referral(0.001), "held-out samples"), (uq.Referral(accuracy=0.9999), "best")):
        with pytest.raises(uq.PosthocUQError, match=word):
            uq.evaluate(predictor, loader_of(x, y), referral=referral, progress=False)
    # too few for the default rate
    posterior = uq.calibrate(posterior, loader_of(x[:30], y[:30]), progress=False)
    assert "Referred by" not in str(uq.evaluate(uq.wrap(model, posterior), loader_of(x, y), progress=False))


def test_what_sets_keep_of_their_promise(images, tmp_path):
    model, fitted, (x, y), _ = images
    posterior = uq.calibrate(fitted, loader_of(x[:60], y[:60]), share=None, progress=False)
    predictor, (x, y) = uq.wrap(model, posterior), (x[60:], y[60:])
    names = [f"<{letter}>" for letter in "abcdefg"]
    evaluation = uq.evaluate(
        {"network": model, "INF": predictor}, loader_of(x, y), class_names=names, progress=False
    )
    prediction, found = predictor(x), evaluation.promised
    assert list(found) == ["INF"] == list(evaluation.promised_by_class)
    for level in (80, 90, 95):
        chosen = prediction.set(level / 100)
        inside = chosen[torch.arange(len(y)), y].double()
        assert found["INF"][f"observed_coverage_{level}"] == pytest.approx(float(inside.mean()))
        assert found["INF"][f"set_size_{level}"] == pytest.approx(float(chosen.sum(1).double().mean()))
        by_class = evaluation.promised_by_class["INF"]["<c>"]
        assert by_class[f"observed_coverage_{level}"] == pytest.approx(float(inside[y == 2].mean()))
    assert evaluation.to_dict()["promised"] == found
    assert {"measure": "set_size_90", "value": found["INF"]["set_size_90"]}.items() <= next(
        row for row in evaluation.rows() if row["measure"] == "set_size_90"
    ).items()
    header, rows = evaluation.tables()["Promised sets by class, the least covered first"]
    assert header[:2] == ["model", "class"] and len(rows) == 7
    assert [row[header.index("observed_coverage_95")] for row in rows] == sorted(
        row[header.index("observed_coverage_95")] for row in rows
    )
    (axes,) = evaluation.figures()["Coverage of promises"].axes
    levels, observed = axes.lines[1].get_data()
    at = list(levels).index(0.9)
    empty = prediction.set(0.9, allow_empty=True)[torch.arange(len(y)), y]
    assert observed[at] == pytest.approx(float(empty.double().mean())) and levels[-1] == 0.95
    page = evaluation.report(tmp_path / "r.html").read_text()
    assert "Promised sets and intervals" in page and "Coverage of promises" in page and "&lt;c&gt;" in page
    grouped = evaluation.coverage_by_group["INF"]
    by = [group.by for group in grouped.groups]
    assert grouped.level == 0.9 and list(dict.fromkeys(by)) == ["entropy", "novelty", "set_size", "class"]
    inside = prediction.set(0.9)[torch.arange(len(y)), y].double()
    fifth = prediction.entropy() > prediction.entropy().quantile(0.8)
    surest = [group for group in grouped.groups if group.by == "entropy"][-1]
    assert surest.inputs == int(fifth.sum()) and surest.coverage == pytest.approx(float(inside[fifth].mean()))
    (own,) = [group for group in grouped.groups if group.name == "<c>"]
    assert own.coverage == pytest.approx(float(inside[y == 2].mean())) and own.low < own.coverage <= own.high
    assert grouped.missing is not None and found["INF"]["ert_90"] == grouped.missing.value
    header, rows = evaluation.tables()["Coverage of promises by group, the least covered first"]
    assert [row[-1] for row in rows] == sorted(group.high for group in grouped.groups)[: len(rows)]
    assert evaluation.to_dict()["coverage_by_group"]["INF"]["ert"]["fails"] is grouped.missing.fails
    drawn = evaluation.figures()["Coverage of promises by group"].axes
    assert [axes.get_xlabel() for axes in drawn] == ["entropy", "novelty", "set size", "class"]
    assert "Coverage of promises by group, the least" in page and "What the words mean" in page
    # enough for 90 % alone
    posterior = uq.calibrate(posterior, loader_of(x[:12], y[:12]), share=None, progress=False)
    found = uq.evaluate(uq.wrap(model, posterior), loader_of(x, y), progress=False).promised["linearized"]
    assert "set_size_90" in found and "set_size_95" not in found


@pytest.mark.parametrize("likelihood", ["regression", "poisson", "multilabel"])
def test_what_intervals_and_labels_keep_of_their_promise(likelihood):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 2, generator=generator)
    y = x + torch.randn(160, 2, generator=generator)
    y = {"regression": y, "poisson": (0.5 * y).exp().round(), "multilabel": (y > 0).float()}[likelihood]
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    posterior = uq.fit(model, [(x, y)], "diag", likelihood=likelihood, prior_precision=5.0, progress=False)
    posterior = uq.calibrate(posterior, loader_of(x[:80], y[:80]), share=None, progress=False)
    prediction, (x, y) = uq.wrap(model, posterior)(x[80:]), (x[80:], y[80:])
    evaluation = uq.evaluate(uq.wrap(model, posterior), loader_of(x, y), progress=False)
    (found,) = evaluation.promised.values()
    if likelihood == "multilabel":
        chosen = prediction.set(0.9)
        assert found["observed_coverage_90"] == pytest.approx(float(chosen[y > 0].double().mean()))
        (by_class,) = evaluation.promised_by_class.values()
        second = float(chosen[:, 1][y[:, 1] > 0].double().mean())
        assert by_class["class 1"]["observed_coverage_90"] == pytest.approx(second)
        (grouped,) = evaluation.coverage_by_group.values()
        assert [group.coverage for group in grouped.groups if group.by == "class"][1] == pytest.approx(second)
    else:
        low, high = prediction.interval(0.9)
        inside, width = ((low <= y) & (y <= high)).double().mean(), (high - low).double().mean()
        if likelihood == "poisson":  # whose bounds are whole numbers
            assert 0.8 < found["observed_coverage_90"] <= float(inside)
        else:
            assert found["observed_coverage_90"] == pytest.approx(float(inside))
        assert found["interval_width_90"] == pytest.approx(float(width), rel=1e-5)
        assert not evaluation.promised_by_class
        (grouped,) = evaluation.coverage_by_group.values()
        assert {group.by for group in grouped.groups} == {"novelty", "interval_width"}
        assert grouped.missing is not None
    assert "Coverage of promises" in evaluation.figures() and "observed coverage of 90 %" in str(evaluation)
    assert "of 80 %" not in str(evaluation)  # one level of each promise


class TestJointScores:
    def test_foreign_data_by_two_scores_by_hand(self, images, compared):
        model, _, (x, y), foreign = images
        _, predictor = compared
        names = ("entropy", "mutual_information")
        evaluation = uq.evaluate(
            {"network": model, "INF": predictor},
            loader_of(x, y),
            ood_loaders={"noise": loader_of(foreign)},
            joint=[names],
            progress=False,
        )
        with torch.no_grad():
            inside, outside = (predictor(data).scores() for data in (x, foreign))

        def shares(judged):
            found = [np.interp(judged[s], np.sort(inside[s]), np.arange(230, 0, -1) / 230) for s in names]
            beyond = [(judged[s] - inside[s].max()).clamp(min=0).numpy() for s in names]
            return -np.log(np.min(found, axis=0)) + 1e3 * np.max(beyond, axis=0)

        scores = np.concatenate([shares(inside), shares(outside)])
        expected = roc_auc_score(np.arange(320) >= 230, scores)
        found = evaluation.foreign["INF"]["noise"]["entropy_and_mutual_information"]
        assert found["auroc"] == pytest.approx(expected, abs=1e-6)
        assert "entropy_and_mutual_information" not in evaluation.foreign["network"]["noise"]
        assert any(row["score"] == "entropy_and_mutual_information" for row in evaluation.rows())
        assert "entropy_and_mutual_information" in str(evaluation)
        assert "entropy_and_mutual_information" not in evaluation.selective["INF"]


class _Page(HTMLParser):
    """Checks that elements are closed in order; collects headings, links, images and drawings."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.images: list[str] = []
        self.links: list[str] = []
        self.linked: list[str] = []
        self.drawn: list[str] = []
        self.ids: list[str] = []
        self.used: set[str] = set()

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.ids += [named["id"]] if "id" in named else []
        self.used |= {named["xlink:href"]} if "xlink:href" in named else set()
        self.used |= set(re.findall(r"url\((#[^)]*)\)", " ".join(value or "" for value in named.values())))
        if tag == "img":
            self.images.append(named["src"])
        if tag == "a":
            self.links.append(named["href"])
        if tag == "svg":
            self.drawn.append(named["aria-label"])
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and re.fullmatch("h[12]", self.open[-1]):
            self.headings.append(data)
        if self.open and self.open[-1] == "a":
            self.linked.append(data)
