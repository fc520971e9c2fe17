"""The figures hold the right numbers, can be written, and leave pyplot alone."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from figure_checks import check_texts_apart, check_written_and_pyplot_left_alone, legend_of
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.evaluation import plots
from posthoc_uq.likelihoods import metrics
from posthoc_uq.likelihoods.value_prediction import RegressionPrediction


def _classified(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(300, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    return (scale * logits).softmax(dim=-1), labels


def _reliability() -> Figure:
    return plots.reliability_diagram({"plain": _classified(2.0), "INF": _classified(1.0)})


def _histograms() -> Figure:
    generator = torch.Generator().manual_seed(5)
    inside, outside = torch.rand(50, generator=generator), 1 + torch.rand(40, generator=generator)
    panels = {f"score {i}": {"in": inside, "letters": outside} for i in range(4)}
    return plots.score_histograms(panels, log={"score 1"})


def _band() -> Figure:
    x = torch.linspace(-1, 1, 20).unsqueeze(-1)
    prediction = RegressionPrediction(x**2, 0.1 + x.abs(), 0.25)
    return plots.regression_band(x, prediction, torch.tensor([0.0, 0.5]), torch.tensor([0.1, 0.3]))


def _equal_mass() -> Figure:
    return plots.reliability_diagram(
        {"plain": _classified(2.0), "INF": _classified(1.0)}, bins=10, binning="equal_mass"
    )


def _losses(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    probs, labels = _classified(scale)
    return 1 - probs.amax(dim=-1), (probs.argmax(dim=-1) != labels).float()


def _risk_coverage() -> Figure:
    scores, losses = _losses(1.0)
    return plots.risk_coverage_plot({"confidence": (scores, losses), "index": (torch.arange(300.0), losses)})


def _referred(scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _losses(scale)[0], *_classified(scale)


def _referral() -> Figure:
    return plots.referral_plot({"plain": _referred(2.0), "INF": _referred(0.5)})


def _regressions() -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(8)
    mean, noise = torch.randn(200, generator=generator), torch.randn(200, generator=generator)
    return {
        "narrow": (mean, torch.full((200,), 0.3), mean + noise),
        "right": (mean, torch.ones(200), mean + noise),
    }


def _coverage() -> Figure:
    return plots.coverage_plot(_regressions())


_ALL = [
    _reliability,
    _equal_mass,
    _histograms,
    _band,
    _risk_coverage,
    _referral,
    _coverage,
]


# what older versions of matplotlib call in newer ones of pyparsing is deprecated, by a UserWarning
@pytest.mark.filterwarnings("error::UserWarning", "ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("draw", _ALL)
def test_writes_a_picture_and_leaves_pyplot_alone(draw: Callable[[], Figure], tmp_path: Path) -> None:
    check_written_and_pyplot_left_alone(draw, tmp_path / "figure.png", most_ink=0.6)


@pytest.mark.parametrize("draw", _ALL)
def test_no_text_is_cut_off_or_lies_on_another(draw: Callable[[], Figure]) -> None:
    check_texts_apart(draw())


def test_reliability_lines_are_the_bins_and_the_legend_the_error() -> None:
    figure = _reliability()
    upper, lower = figure.axes
    legend = upper.get_legend()
    assert legend is not None
    texts = [text.get_text() for text in legend.get_texts()]
    for name, scale, line in (("plain", 2.0, upper.lines[1]), ("INF", 1.0, upper.lines[2])):
        probs, labels = _classified(scale)
        bins = metrics.calibration_bins(probs, labels)
        filled = bins.counts > 0
        np.testing.assert_allclose(line.get_xdata(), bins.confidence[filled].numpy())
        np.testing.assert_allclose(line.get_ydata(), bins.accuracy[filled].numpy())
        assert f"{name} (ECE {metrics.expected_calibration_error(probs, labels):.3f})" in texts
    outlines = [patch for patch in lower.patches if isinstance(patch, StepPatch)]
    np.testing.assert_allclose([patch.get_data().values.sum() for patch in outlines], 1)


def test_reliability_bars_are_wilson_intervals() -> None:
    # four inputs in the last bin, three right: Wilson's interval of 3/4 is 0.3006 to 0.9544
    figure = plots.reliability_diagram({"m": (torch.tensor([[0.99, 0.01]] * 4), torch.tensor([0, 0, 0, 1]))})
    (segment,) = figure.axes[0].collections[0].get_segments()
    np.testing.assert_allclose(segment[:, 1], [0.3006, 0.9544], atol=1e-4)


def test_reliability_in_bins_of_equal_mass() -> None:
    upper, lower = _equal_mass().axes
    probs, labels = _classified(1.0)
    bins = metrics.calibration_bins(probs, labels, 10, "equal_mass")
    assert bins.counts.tolist() == [30] * 10
    np.testing.assert_allclose(upper.lines[2].get_xdata(), bins.confidence.numpy())
    np.testing.assert_allclose(upper.lines[2].get_ydata(), bins.accuracy.numpy())
    error = metrics.expected_calibration_error(probs, labels, 10, "equal_mass")
    assert f"INF (ECE {error:.3f})" in legend_of(upper)
    # below, the confidences themselves, in bins of equal width
    shares = np.histogram(probs.amax(dim=-1).numpy(), np.linspace(0, 1, 11))[0] / 300
    outlines = [patch for patch in lower.patches if isinstance(patch, StepPatch)]
    np.testing.assert_allclose(outlines[-1].get_data().values, shares)


def test_risk_coverage_draws_curves_and_references_once_for_common_losses() -> None:
    (axes,) = _risk_coverage().axes
    scores, losses = _losses(1.0)
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
    area = metrics.risk_coverage(scores, losses).area
    assert legend_of(axes) == [
        f"confidence (AURC {area:#.3g})",
        f"index (AURC {running.mean():#.3g})",
        "random order",
        "ideal order",
    ]
    assert axes.get_ylim()[1] >= max(running[15:])


def test_risk_coverage_of_models_with_losses_of_their_own_and_many_inputs() -> None:
    (axes,) = plots.risk_coverage_plot({"a": _losses(1.0), "b": _referred(1.0)[:1] + (torch.ones(300),)}).axes
    assert len(axes.lines) == 6
    assert list(axes.lines[2].get_ydata()) == [1, 1]
    assert axes.lines[2].get_color() == axes.lines[5].get_color() != axes.lines[0].get_color()
    scores, losses = torch.arange(5000.0), torch.arange(5000.0)
    (axes,) = plots.risk_coverage_plot({"many": (scores, losses)}).axes
    x, y = axes.lines[2].get_data()
    assert len(x) == 1000
    assert (x[0], x[-1]) == pytest.approx((1 / 5000, 1))
    np.testing.assert_allclose(y, (5000 * np.asarray(x) - 1) / 2, atol=1e-9)
    # nothing is ever wrong: the axis still has a height
    (axes,) = plots.risk_coverage_plot({"right": (scores, torch.zeros(5000))}).axes
    assert axes.get_ylim()[1] == 1


def test_referral_lines_are_the_selective_scores() -> None:
    (axes,) = _referral().axes
    rates = [k / 100 for k in range(96)]
    for line, scale, name in zip(axes.lines, (2.0, 0.5), ("plain", "INF"), strict=True):
        np.testing.assert_allclose(line.get_xdata(), rates)
        np.testing.assert_allclose(line.get_ydata(), metrics.selective_accuracy(*_referred(scale), rates))
        area = metrics.selective_accuracy_area(*_referred(scale))
        assert f"{name} (area {area:.3f})" in legend_of(axes)
    (axes,) = plots.referral_plot({"m": _referred(1.0)}, metric="auc", rates=[0.5, 0.0, 0.2]).axes
    assert list(axes.lines[0].get_xdata()) == [0, 0.2, 0.5]
    expected = metrics.selective_auc(*_referred(1.0), [0, 0.2, 0.5])
    np.testing.assert_allclose(axes.lines[0].get_ydata(), expected)
    assert legend_of(axes) == ["m"]


def test_coverage_lines_are_the_coverage_curves() -> None:
    (axes,) = _coverage().axes
    for (name, parts), line in zip(_regressions().items(), axes.lines[1:], strict=True):
        curve = metrics.coverage_curve(*parts)
        np.testing.assert_allclose(line.get_xdata(), curve.nominal)
        np.testing.assert_allclose(line.get_ydata(), curve.observed)
        assert f"{name} (mean gap {curve.error:.3f})" in legend_of(axes)
    # a coin thrown 200 times shows heads 86 to 114 times in 95 % of the cases
    outline = axes.collections[0].get_paths()[0].vertices
    middle = outline[np.isclose(outline[:, 0], 0.5)][:, 1]
    assert (middle.min(), middle.max()) == pytest.approx((0.43, 0.57))
    (axes,) = plots.coverage_plot(_regressions(), levels=[0.8, 0.1], kind="quantile").axes
    assert list(axes.lines[1].get_xdata()) == [0.1, 0.8]
    expected = metrics.coverage_curve(*_regressions()["narrow"], [0.1, 0.8], kind="quantile").observed
    np.testing.assert_allclose(axes.lines[1].get_ydata(), expected)


def test_histograms_count_every_input_once_and_name_the_auroc() -> None:
    figure = _histograms()
    assert len(figure.axes) == 4
    assert [axes.get_xscale() for axes in figure.axes] == ["linear", "log", "linear", "linear"]
    for axes in figure.axes:
        legend = axes.get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == ["in", "letters (AUROC 1.000)"]
        np.testing.assert_allclose([patch.get_data().values.sum() for patch in axes.patches], 1)


def test_histograms_of_constant_and_zero_scores() -> None:
    zeros, mixed = torch.zeros(5), torch.tensor([0.0, 1e-3, 10.0])
    figure = plots.score_histograms(
        {"constant": {"in": zeros, "out": zeros}, "mixed": {"in": mixed}, "one": {"in": mixed[2:]}},
        log=["mixed", "one"],
    )
    for axes in figure.axes:
        np.testing.assert_allclose([patch.get_data().values.sum() for patch in axes.patches], 1)
    assert min(figure.axes[1].patches[0].get_data().edges) == pytest.approx(1e-3)


def test_band_sorts_its_input_and_covers_the_interval() -> None:
    order = torch.randperm(20, generator=torch.Generator().manual_seed(6))
    x = torch.linspace(-1, 1, 20)
    prediction = RegressionPrediction((x**2)[order], (0.1 + x.abs())[order], 0.25)
    figure = plots.regression_band(x[order], prediction, torch.zeros(1), torch.zeros(1), level=0.8)
    (axes,) = figure.axes
    np.testing.assert_allclose(axes.lines[0].get_xdata(), x.numpy())
    np.testing.assert_allclose(axes.lines[0].get_ydata(), (x**2).numpy())
    total, weights = (c.get_paths()[0].vertices for c in axes.collections)
    lower, upper = RegressionPrediction(x**2, 0.1 + x.abs(), 0.25).interval(0.8)
    assert total[:, 1].max() == pytest.approx(upper.max().item())
    assert total[:, 1].min() == pytest.approx(lower.min().item())
    # 0.9 quantile of the standard normal times sqrt(1.1) around 1
    assert weights[:, 1].max() == pytest.approx(1 + 1.2815516 * math.sqrt(1.1), rel=1e-6)


def test_wrong_input_is_one_clear_error() -> None:
    x, one = torch.zeros(3), torch.ones(1)
    prediction = RegressionPrediction(x, x, 0.1)
    wide = RegressionPrediction(torch.zeros(3, 2), torch.zeros(3, 2), 0.1)
    probs = _classified(1.0)
    cases = [
        (lambda: plots.reliability_diagram({}), "at least one model"),
        (lambda: plots.reliability_diagram({"a": probs}, binning="mass"), "binning must be one of"),  # pyright: ignore[reportArgumentType]
        (lambda: plots.risk_coverage_plot({}), "at least one model"),
        (lambda: plots.risk_coverage_plot({"a": (x, x + math.inf)}), "losses of 'a' must be finite"),
        (lambda: plots.risk_coverage_plot({"a": (x, x[:2])}), "losses must hold one number"),
        (lambda: plots.referral_plot({}), "at least one model"),
        (lambda: plots.referral_plot({"a": _referred(1.0)}, metric="nll"), "not 'nll'"),  # pyright: ignore[reportArgumentType]
        (lambda: plots.referral_plot({"a": _referred(1.0)}, rates=[1.0]), "rates must be numbers"),
        (lambda: plots.coverage_plot({}), "at least one model"),
        (lambda: plots.coverage_plot({"a": (x, x - 1, x)}), "nowhere negative"),
        (lambda: plots.score_histograms({}), "at least one panel"),
        (lambda: plots.score_histograms({"a": {}}), "at least one panel"),
        (lambda: plots.score_histograms({"a": {"in": one}}, log=["b"]), "do not exist: b"),
        (lambda: plots.score_histograms({"a": {"in": torch.zeros(0)}}), "'in' in 'a' must be finite"),
        (lambda: plots.score_histograms({"a": {"in": one * math.nan}}), "'in' in 'a' must be finite"),
        (lambda: plots.score_histograms({"a": {"in": x}}, log=["a"]), "no positive score"),
        (lambda: plots.regression_band(torch.zeros(3, 2), prediction, x, x), "one dimension: x must"),
        (lambda: plots.regression_band(x, wide, x, x), "prediction.mean must"),
        (lambda: plots.regression_band(x[:2], prediction, x, x), "x has 2 inputs"),
        (lambda: plots.regression_band(x, prediction, x, x[:2]), "x_train has 3 points"),
        (lambda: plots.regression_band(x, prediction, x, x, level=95), "between 0 and 1"),
    ]
    for call, message in cases:
        with pytest.raises(PosthocUQError, match=message):
            call()


def test_matplotlib_is_loaded_when_a_figure_is_asked_for_and_every_name_is_public() -> None:
    code = (
        "import sys, posthoc_uq; from posthoc_uq import plots; assert 'matplotlib' not in sys.modules;"
        "assert all(callable(getattr(plots, name)) for name in plots.__all__);"
        "assert set(plots.__all__) <= set(dir(plots)); assert 'matplotlib' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'pie_chart'"):
        _ = plots.pie_chart
