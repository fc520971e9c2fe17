"""The figures hold the right numbers, can be read and written, and leave pyplot alone."""

import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from torch import Tensor

from posthoc_uq import ClassPrediction, PosthocUQError, RegressionPrediction
from posthoc_uq.evaluation import CoverageGroup, ExcessRisk, GroupedCoverage, metrics, plots


def classified(scale: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(300, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    return (scale * logits).softmax(dim=-1), labels


def predicted(scale: float) -> tuple[ClassPrediction, Tensor]:
    """With the probabilities of `classified`."""
    probs, labels = classified(scale)
    return ClassPrediction.from_logits(probs.log().unsqueeze(0)), labels


def with_losses(scale: float) -> tuple[Tensor, Tensor]:
    probs, labels = classified(scale)
    return 1 - probs.amax(dim=-1), (probs.argmax(dim=-1) != labels).float()


def regressions() -> dict[str, tuple[RegressionPrediction, Tensor]]:
    generator = torch.Generator().manual_seed(8)
    mean, noise = torch.randn(200, generator=generator), torch.randn(200, generator=generator)
    return {
        "narrow": (RegressionPrediction(mean, torch.full((200,), 0.2), 0.1), mean + noise),
        "right": (RegressionPrediction(mean, torch.ones(200), 0.0), mean + noise),
    }


_CENTRES = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])


def linear(classes: int) -> Callable[[Tensor], ClassPrediction]:
    """Logits x . centre under three draws of different scale; with two classes one logit, the first input."""

    def predict(x: Tensor) -> ClassPrediction:
        assert not torch.is_grad_enabled()
        centres = _CENTRES[:classes].to(x)
        logits = (x[:, :1] if classes == 2 else x @ centres.T) * torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
        return ClassPrediction.from_logits(logits, binary=classes == 2)

    return predict


def points_of(classes: int) -> tuple[Tensor, Tensor]:
    labels = torch.arange(40) % classes
    noise = 0.4 * torch.randn(40, 2, generator=torch.Generator().manual_seed(9))
    return _CENTRES[labels % 4] + noise, labels


def reliability() -> Figure:
    return plots.reliability_diagram({"plain": predicted(2.0), "INF": predicted(1.0)})


def four_models() -> Figure:
    names = ("plain", "INF", "KFAC", "diagonal")
    return plots.reliability_diagram(dict.fromkeys(names, predicted(1.0)), bins=10)


def histograms() -> Figure:
    generator = torch.Generator().manual_seed(5)
    inside, outside = torch.rand(50, generator=generator), 1 + torch.rand(40, generator=generator)
    panels = {f"score {i}": {"in": inside, "letters": outside} for i in range(4)}
    return plots.histogram_panels(panels, log={"score 1"})


def band() -> Figure:
    order = torch.randperm(20, generator=torch.Generator().manual_seed(6))
    x = torch.linspace(-1, 1, 20)
    prediction = RegressionPrediction((x**2)[order], (0.1 + x.abs())[order], 0.25)
    return plots.regression_band(x[order], prediction, torch.zeros(1), torch.zeros(1), level=0.8)


def risk_coverage() -> Figure:
    return plots.risk_coverage_plot(*predicted(1.0), score=["max_probability", index])


def index(prediction: ClassPrediction) -> Tensor:
    return torch.arange(float(len(prediction)))


def referral() -> Figure:
    return plots.referral_plot({"plain": predicted(2.0), "INF": predicted(0.5)}, score="max_probability")


def coverage() -> Figure:
    return plots.coverage_plot(regressions())


def map_of_two() -> Figure:
    return plots.class_uncertainty_map(linear(2), *points_of(2), resolution=30)


def map_of_four() -> Figure:
    return plots.class_uncertainty_map(
        linear(4), *points_of(4), resolution=30, score="epistemic_variance", log=True
    )


def groups() -> Figure:
    halves = [
        CoverageGroup("entropy", f"{low:.1f} to {low + 0.1:.1f}", 80, 0.8 + low / 4, 0.7, 0.95)
        for low in (0.1, 0.2)
    ]
    classes = [CoverageGroup("class", f"<{own}>", 9 + own, 0.9 - own / 50, 0.6, 0.97) for own in range(20)]
    first = GroupedCoverage(0.9, ExcessRisk(0.0213, 0.004), halves + classes)
    return plots.group_panels({"INF": first, "KFAC": GroupedCoverage(0.8, None, halves)})


# what older versions of matplotlib call in newer ones of pyparsing is deprecated, by a UserWarning
@pytest.mark.filterwarnings("error::UserWarning", "ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("draw", "most_ink"),
    [
        (f, 0.6)
        for f in (reliability, four_models, histograms, band, risk_coverage, referral, coverage, groups)
    ]
    + [(map_of_two, 0.95), (map_of_four, 0.95)],  # a map fills most of its picture
)
def test_can_be_written_and_read_and_leaves_pyplot_alone(
    draw: Callable[[], Figure], most_ink: float, tmp_path: Path
) -> None:
    own = plt.figure()
    try:
        before = dict(matplotlib.rcParams), plt.get_fignums(), matplotlib.get_backend()
        figure = draw()
        figure.savefig(tmp_path / "figure.png")
        assert (dict(matplotlib.rcParams), plt.get_fignums(), matplotlib.get_backend()) == before
        assert plt.gcf() is own
    finally:
        plt.close(own)
    pixels = plt.imread(tmp_path / "figure.png")[..., :3]
    assert pixels.shape[0] > 400 and 0.01 < (pixels < 0.95).any(axis=-1).mean() < most_ink
    check_texts_apart(figure)


def check_texts_apart(figure: Figure) -> None:
    """No label, title or legend is cut off, lies on another one, or on the axes of a plot."""
    figure.draw_without_rendering()
    texts: list[Text] = []
    for axes in figure.axes:
        texts += [axes.xaxis.label, axes.yaxis.label, axes.title, getattr(axes, "_left_title")]  # noqa: B009
    legends = [axes.get_legend() for axes in figure.axes] + list(figure.legends)
    texts += [text for legend in legends if legend is not None for text in legend.get_texts()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    assert len(boxes) > 2
    for name, box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, name
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, name
        assert not any(box.padded(-1).overlaps(axes.get_window_extent()) for axes in figure.axes), name
    for (name, box), (other, second) in combinations(boxes, 2):
        assert not box.padded(-1).overlaps(second.padded(-1)), (name, other)


def legend_of(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_reliability_has_a_panel_for_each_model_with_bins_of_equal_mass() -> None:
    for axes, name, scale in zip(reliability().axes, ("plain", "INF"), (2.0, 1.0), strict=False):
        probs, labels = classified(scale)
        confidence, order = probs.amax(dim=-1).double().sort()
        right = (probs.argmax(dim=-1) == labels)[order].double()
        x, y = axes.lines[1].get_data()
        # bins of 20 inputs; at the right end more, where the marks of several would lie on each other
        chunks = confidence.reshape(15, 20).mean(dim=1), right.reshape(15, 20).mean(dim=1)
        np.testing.assert_allclose(x[:5], chunks[0][:5], rtol=1e-6)
        np.testing.assert_allclose(y[:5], chunks[1][:5], rtol=1e-6)
        assert np.diff(x).min() >= 0.025 and len(x) < 15
        error = metrics.expected_calibration_error(probs, labels)
        assert axes.get_title(loc="left") == f"{name}\nECE {error:.3f}"
    # below, the confidences themselves, in bins of equal width
    shares = np.histogram(classified(1.0)[0].amax(dim=-1).numpy(), np.linspace(0, 1, 16))[0] / 300
    (outline,) = [patch for patch in reliability().axes[3].patches if isinstance(patch, StepPatch)]
    np.testing.assert_allclose(outline.get_data().values, shares)
    assert len(four_models().axes) == 8  # no empty panels


def test_reliability_bars_are_wilson_intervals() -> None:
    # four inputs, too few for more than one bin, three right: Wilson's interval of 3/4 is 0.3006 to 0.9544
    prediction = ClassPrediction.from_logits(torch.tensor([[0.99, 0.01]] * 4).log().unsqueeze(0))
    figure = plots.reliability_diagram(prediction, torch.tensor([0, 0, 0, 1]))
    assert figure.axes[0].get_title(loc="left") == "ECE 0.240"
    (segment,) = figure.axes[0].collections[0].get_segments()
    np.testing.assert_allclose(segment[:, 1], [0.3006, 0.9544], atol=1e-4)


def test_risk_coverage_draws_curves_and_references_once_for_common_losses() -> None:
    (axes,) = risk_coverage().axes
    scores, losses = with_losses(1.0)
    random, ideal, confidence, index = axes.lines
    mean = losses.mean().item()
    assert list(random.get_ydata()) == pytest.approx([mean, mean])
    wrong = int(losses.sum())
    perfect = [max(0, k - (300 - wrong)) / k for k in range(1, 301)]
    np.testing.assert_allclose(ideal.get_ydata(), perfect, atol=1e-12)
    np.testing.assert_allclose(confidence.get_ydata(), metrics.risk_coverage(scores, losses).risk)
    running = np.cumsum(losses.numpy()) / np.arange(1, 301)
    np.testing.assert_allclose(index.get_ydata(), running, rtol=1e-6)
    np.testing.assert_allclose(index.get_xdata(), np.arange(1, 301) / 300)
    areas = [metrics.risk_coverage(scores, losses).area, running.mean()]
    shown = [f"{name} (AURC {a:#.3g})" for name, a in zip(("max probability", "index"), areas, strict=True)]
    assert legend_of(axes) == [*shown, "random order", "ideal order"]
    assert axes.get_ylim()[1] >= max(running[15:])


def test_risk_coverage_of_models_with_losses_of_their_own_and_many_inputs() -> None:
    prediction, labels = predicted(1.0)
    wrong = (prediction.predicted() + 1) % 4
    (axes,) = plots.risk_coverage_plot({"a": (prediction, labels), "b": (prediction, wrong)}).axes
    assert len(axes.lines) == 6 and list(axes.lines[2].get_ydata()) == [1, 1]
    assert axes.lines[2].get_color() == axes.lines[5].get_color() != axes.lines[0].get_color()
    many = RegressionPrediction(torch.zeros(5000), torch.ones(5000), 0.0)
    (axes,) = plots.risk_coverage_plot(many, torch.arange(5000.0).sqrt(), score=index).axes
    x, y = axes.lines[2].get_data()
    assert len(x) == 1000 and (x[0], x[-1]) == pytest.approx((1 / 5000, 1))
    np.testing.assert_allclose(y, (5000 * np.asarray(x) - 1) / 2, atol=1e-9)
    # nothing is ever wrong: the axis still has a height
    (axes,) = plots.risk_coverage_plot({"right": (many, many.mean)}).axes
    assert axes.get_ylim()[1] == 1


def test_referral_lines_are_the_selective_scores() -> None:
    (axes,) = referral().axes
    rates = [k / 100 for k in range(96)]
    for line, scale, name in zip(axes.lines, (2.0, 0.5), ("plain", "INF"), strict=True):
        np.testing.assert_allclose(line.get_xdata(), rates)
        np.testing.assert_allclose(
            line.get_ydata(), metrics.selective_accuracy(with_losses(scale)[0], *classified(scale), rates)
        )
        area = metrics.selective_accuracy_area(with_losses(scale)[0], *classified(scale))
        assert f"{name} (area {area:.3f})" in legend_of(axes)
    (axes,) = plots.referral_plot(
        {"m": predicted(1.0)}, metric="auc", rates=[0.5, 0.0, 0.2], score="max_probability"
    ).axes
    assert list(axes.lines[0].get_xdata()) == [0, 0.2, 0.5]
    expected = metrics.selective_auc(with_losses(1.0)[0], *classified(1.0), [0, 0.2, 0.5])
    np.testing.assert_allclose(axes.lines[0].get_ydata(), expected)


def test_coverage_lines_are_the_coverage_curves() -> None:
    (axes,) = coverage().axes
    for (name, (prediction, targets)), line in zip(regressions().items(), axes.lines[1:], strict=True):
        curve = metrics.coverage_curve(prediction.mean, prediction.variance, targets)
        np.testing.assert_allclose(line.get_xdata(), curve.nominal)
        np.testing.assert_allclose(line.get_ydata(), curve.observed)
        assert f"{name} (mean gap {curve.error:.3f})" in legend_of(axes)
    # a coin thrown 200 times shows heads 86 to 114 times in 95 % of the cases
    outline = axes.collections[0].get_paths()[0].vertices
    middle = outline[np.isclose(outline[:, 0], 0.5)][:, 1]
    assert (middle.min(), middle.max()) == pytest.approx((0.43, 0.57))
    (axes,) = plots.coverage_plot(regressions(), levels=[0.8, 0.1], kind="quantile").axes
    assert list(axes.lines[1].get_xdata()) == [0.1, 0.8]
    narrow, targets = regressions()["narrow"]
    expected = metrics.coverage_curve(
        narrow.mean, narrow.variance, targets, [0.1, 0.8], kind="quantile"
    ).observed
    np.testing.assert_allclose(axes.lines[1].get_ydata(), expected)


def test_groups_are_drawn_at_their_coverage_the_least_covered_of_many() -> None:
    figure = groups()
    halves, classes, other = figure.axes
    assert [label.get_text() for label in halves.get_xticklabels()] == ["0.1 to 0.2", "0.2 to 0.3"]
    assert list(halves.lines[0].get_ydata()) == pytest.approx([0.825, 0.85])
    assert list(halves.lines[1].get_ydata()) == [
        0.9,
        0.9,
    ]
    assert list(classes.lines[0].get_ydata()) == pytest.approx([0.9 - own / 50 for own in range(19, 7, -1)])
    assert other.get_xlabel() == "entropy, KFAC" and list(other.lines[1].get_ydata()) == [0.8, 0.8]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["INF (ERT 0.021 ± 0.008)", "KFAC"]


def test_histograms_count_every_input_once_and_name_the_auroc() -> None:
    zeros, mixed = torch.zeros(5), torch.tensor([0.0, 1e-3, 10.0])
    edges = plots.histogram_panels(
        {"constant": {"in": zeros, "out": zeros}, "mixed": {"in": mixed}, "one": {"in": mixed[2:]}},
        log=["mixed", "one"],
    )
    figure = histograms()
    for axes in figure.axes + edges.axes:
        np.testing.assert_allclose([patch.get_data().values.sum() for patch in axes.patches], 1)
    assert [axes.get_xscale() for axes in figure.axes] == ["linear", "log", "linear", "linear"]
    assert all(legend_of(axes) == ["in", "letters (AUROC 1.000)"] for axes in figure.axes)
    assert min(edges.axes[1].patches[0].get_data().edges) == pytest.approx(1e-3)


def test_band_sorts_its_input_and_covers_the_interval() -> None:
    (axes,) = band().axes
    x = torch.linspace(-1, 1, 20)
    np.testing.assert_allclose(axes.lines[0].get_xdata(), x.numpy())
    np.testing.assert_allclose(axes.lines[0].get_ydata(), (x**2).numpy())
    total, weights = (c.get_paths()[0].vertices for c in axes.collections)
    lower, upper = RegressionPrediction(x**2, 0.1 + x.abs(), 0.25).interval(0.8)
    assert total[:, 1].max() == pytest.approx(upper.max().item())
    assert total[:, 1].min() == pytest.approx(lower.min().item())
    # 0.9 quantile of the standard normal times sqrt(1.1) around 1
    assert weights[:, 1].max() == pytest.approx(1 + 1.2815516 * math.sqrt(1.1), rel=1e-6)


class TestMaps:
    def test_of_two_classes_shows_probability_and_entropy(self) -> None:
        figure = map_of_two()
        left, right = figure.axes[:2]
        x_train, labels = points_of(2)
        probability, entropy = left.images[0], right.images[0]
        low, high = x_train.amin(0), x_train.amax(0)
        x = np.linspace((1.5 * low - 0.5 * high)[0].item(), (1.5 * high - 0.5 * low)[0].item(), 30)
        # the logit is the first input, scaled by 1, 2 and 4
        expected = np.mean([1 / (1 + np.exp(-scale * x)) for scale in (1, 2, 4)], axis=0)
        np.testing.assert_allclose(probability.get_array(), np.tile(expected, (30, 1)), atol=1e-5)
        plain = -(expected * np.log(expected) + (1 - expected) * np.log(1 - expected))
        np.testing.assert_allclose(entropy.get_array(), np.tile(plain, (30, 1)), atol=1e-5)
        # pixels are centred on the points of the grid
        step = x[1] - x[0]
        extent = [x[0] - step / 2, x[-1] + step / 2]
        assert probability.get_extent()[:2] == pytest.approx(extent, abs=1e-5)
        for axes in (left, right):
            for c, line in enumerate(axes.lines):
                np.testing.assert_allclose(np.transpose(line.get_data()), x_train[labels == c], rtol=1e-6)
            (boundary,) = axes.collections[0].get_paths()
            np.testing.assert_allclose(boundary.vertices[:, 0], 0, atol=1e-2)
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["class 0", "class 1"]

    def test_of_four_classes_colours_the_most_probable(self) -> None:
        left, right = map_of_four().axes[:2]
        image = np.asarray(left.images[0].get_array())
        # class 0 is at the right, 1 at the left, 2 above, 3 below; each has the hue of its points
        for c, pixel in enumerate((image[15, -1], image[15, 0], image[-1, 15], image[0, 15])):
            hue, own = 1 - pixel, 1 - np.array(to_rgb(left.lines[c].get_color()))
            np.testing.assert_allclose(hue / hue.max(), own / own.max(), atol=1e-6)
        assert image[15, 15].min() > image[15, -1].min(), "paler where the classes meet"
        extent = right.images[0].get_extent()
        x, y = np.meshgrid(*(np.linspace(*extent[i : i + 2], 61)[1::2] for i in (0, 2)))
        # the draws' scales 1, 2, 4 have variance 7 / 3; of the logits x, -x, y, -y the mean square is (x^2 + y^2) / 2
        np.testing.assert_allclose(right.images[0].get_array(), 7 / 3 * (x**2 + y**2) / 2, rtol=1e-3)

    def test_of_many_classes_numbers_them_and_takes_any_score(self) -> None:
        def predict(x: Tensor) -> ClassPrediction:
            assert x.dtype == torch.float64
            angle = torch.arange(9) * 2 * math.pi / 9
            logits = x @ torch.stack([angle.cos(), angle.sin()]).to(x)
            return ClassPrediction.from_logits(logits.unsqueeze(0))

        x_train = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        labels = predict(x_train).predicted()
        score = ClassPrediction.expected_entropy
        figure = plots.class_uncertainty_map(predict, x_train, labels, score=score, resolution=9)
        numbers = [text.get_text() for text in figure.axes[0].texts]
        assert numbers == [str(c) for c in labels.unique().tolist()] and not figure.legends
        assert figure.axes[2].get_ylabel() == "expected_entropy"
        styles = {(line.get_color(), line.get_marker()) for line in figure.axes[0].lines}
        assert len(styles) == len(numbers)

    def test_of_points_on_a_line_and_of_an_uncertainty_that_is_zero(self) -> None:
        flat = torch.tensor([[0.0, 3.0], [2.0, 3.0]])
        one = lambda x: ClassPrediction.from_logits(x[:, :1].unsqueeze(0), binary=True)  # noqa: E731
        options = {"score": "epistemic_variance", "resolution": 5}
        figure = plots.class_uncertainty_map(one, flat, torch.tensor([0, 1]), **options)
        assert figure.axes[0].get_ylim() == pytest.approx((2.375, 3.625))
        assert float(np.max(figure.axes[1].images[0].get_array())) == 0
        with pytest.raises(PosthocUQError, match="no positive score"):
            plots.class_uncertainty_map(one, flat, torch.tensor([0, 1]), log=True, **options)


def test_figures_take_one_prediction_and_say_what_they_take() -> None:
    prediction, labels = predicted(1.0)
    values, targets = regressions()["right"]
    (axes,) = plots.coverage_plot(values, targets).axes
    assert legend_of(axes)[-1].startswith("mean gap")
    (axes,) = plots.referral_plot(prediction, labels, score=["entropy", "max_probability"]).axes
    assert [text.split(" (")[0] for text in legend_of(axes)] == ["entropy", "max probability"]
    foreign, _ = predicted(0.1)
    figure = plots.score_histograms(prediction, foreign, scores=["entropy", "max_probability"])
    assert [axes.get_xlabel() for axes in figure.axes] == ["entropy", "max probability"]
    auroc = metrics.ood_auroc(prediction.entropy(), foreign.entropy())
    assert legend_of(figure.axes[0]) == ["test", f"foreign (AUROC {auroc:.3f})"]
    (axes,) = plots.score_histograms({"INF": (prediction, {"letters": foreign})}).axes
    assert axes.get_xlabel() == "entropy, INF"
