"""What every figure has to hold, whatever it shows."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text


def check_written_and_pyplot_left_alone(draw: Callable[[], Figure], path: Path, most_ink: float) -> None:
    """The picture is neither empty nor full, and pyplot's figures, settings and backend are as before."""
    own = plt.figure()
    try:
        before = dict(matplotlib.rcParams), plt.get_fignums(), matplotlib.get_backend()
        draw().savefig(path)
        assert (dict(matplotlib.rcParams), plt.get_fignums(), matplotlib.get_backend()) == before
        assert plt.gcf() is own
    finally:
        plt.close(own)
    pixels = plt.imread(path)[..., :3]
    assert pixels.shape[0] > 400
    assert 0.01 < (pixels < 0.95).any(axis=-1).mean() < most_ink


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
    """The lines of text in the legend of the axes."""
    legend = axes.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]
