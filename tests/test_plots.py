"""The figures hold the right numbers, can be written, and leave pyplot alone."""

import math
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from posthoc_uq import metrics, plots
from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.prediction import RegressionPrediction


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


@pytest.mark.parametrize("draw", [_reliability, _histograms, _band])
def test_writes_a_picture_and_leaves_pyplot_alone(draw, tmp_path: Path) -> None:
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
    assert pixels.shape[0] > 400
    assert 0.01 < (pixels < 0.95).any(axis=-1).mean() < 0.6


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
    cases = [
        (lambda: plots.reliability_diagram({}), "at least one model"),
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
