"""The maps of classifiers of two inputs: right numbers at the right places, any number of classes."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from figure_checks import check_texts_apart, check_written_and_pyplot_left_alone
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.evaluation import plots
from posthoc_uq.likelihoods.class_prediction import ClassPrediction

_CENTRES = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])


def _linear(classes: int) -> Callable[[torch.Tensor], ClassPrediction]:
    """Logits x . trained_mean under three draws of different scale; with two classes one logit, the first input."""

    def predict(x: torch.Tensor) -> ClassPrediction:
        assert not torch.is_grad_enabled()
        centres = _CENTRES[:classes].to(x)
        logits = (x[:, :1] if classes == 2 else x @ centres.T) * torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
        return ClassPrediction.from_logits(logits, binary=classes == 2)

    return predict


def _points(classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(40) % classes
    noise = 0.4 * torch.randn(40, 2, generator=torch.Generator().manual_seed(9))
    return _CENTRES[labels % 4] + noise, labels


def _map_of_two() -> Figure:
    return plots.class_uncertainty_map(_linear(2), *_points(2), resolution=60)


def _map_of_four() -> Figure:
    return plots.class_uncertainty_map(
        _linear(4), *_points(4), resolution=60, score="functional_variance", log=True
    )


# what older versions of matplotlib call in newer ones of pyparsing is deprecated, by a UserWarning
@pytest.mark.filterwarnings("error::UserWarning", "ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("draw", [_map_of_two, _map_of_four])
def test_writes_a_picture_that_can_be_read(draw: Callable[[], Figure], tmp_path: Path) -> None:
    # a map fills most of its picture
    check_written_and_pyplot_left_alone(draw, tmp_path / "figure.png", most_ink=0.95)
    check_texts_apart(draw())


def test_map_of_two_classes_shows_probability_and_entropy() -> None:
    figure = _map_of_two()
    left, right = figure.axes[:2]
    x_train, labels = _points(2)
    probability, entropy = left.images[0], right.images[0]
    low, high = x_train.amin(0), x_train.amax(0)
    x = np.linspace((1.5 * low - 0.5 * high)[0].item(), (1.5 * high - 0.5 * low)[0].item(), 60)
    # the logit is the first input, scaled by 1, 2 and 4
    expected = np.mean([1 / (1 + np.exp(-scale * x)) for scale in (1, 2, 4)], axis=0)
    np.testing.assert_allclose(probability.get_array(), np.tile(expected, (60, 1)), atol=1e-5)
    plain = -(expected * np.log(expected) + (1 - expected) * np.log(1 - expected))
    np.testing.assert_allclose(entropy.get_array(), np.tile(plain, (60, 1)), atol=1e-5)
    assert (entropy.get_clim()[0], probability.get_clim()) == (pytest.approx(plain.min(), abs=1e-5), (0, 1))
    # pixels are centred on the points of the grid
    step = x[1] - x[0]
    assert probability.get_extent()[:2] == pytest.approx([x[0] - step / 2, x[-1] + step / 2], abs=1e-5)
    for axes in (left, right):
        for c, line in enumerate(axes.lines):
            np.testing.assert_allclose(np.transpose(line.get_data()), x_train[labels == c], rtol=1e-6)
        (boundary,) = axes.collections[0].get_paths()
        np.testing.assert_allclose(boundary.vertices[:, 0], 0, atol=1e-2)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["class 0", "class 1"]


def test_map_of_four_classes_colours_the_most_probable() -> None:
    left, right = _map_of_four().axes[:2]
    image = np.asarray(left.images[0].get_array())
    assert image.shape == (60, 60, 3)
    # class 0 is at the right, 1 at the left, 2 above, 3 below; each has the hue of its points
    for c, pixel in enumerate((image[30, -1], image[30, 0], image[-1, 30], image[0, 30])):
        hue, own = 1 - pixel, 1 - np.array(to_rgb(left.lines[c].get_color()))
        np.testing.assert_allclose(hue / hue.max(), own / own.max(), atol=1e-6)
    # paler where the classes meet
    assert image[30, 30].min() > image[30, -1].min()
    x, y = np.meshgrid(*(np.linspace(*right.images[0].get_extent()[i : i + 2], 121)[1::2] for i in (0, 2)))
    # the draws' scales 1, 2, 4 have variance 7 / 3; of the logits x, -x, y, -y the mean square is (x^2 + y^2) / 2
    np.testing.assert_allclose(right.images[0].get_array(), 7 / 3 * (x**2 + y**2) / 2, rtol=1e-3)


def test_map_of_many_classes_numbers_them_and_takes_any_score() -> None:
    def predict(x: torch.Tensor) -> ClassPrediction:
        assert x.dtype == torch.float64
        angle = torch.arange(9) * 2 * math.pi / 9
        return ClassPrediction.from_logits((x @ torch.stack([angle.cos(), angle.sin()]).to(x)).unsqueeze(0))

    def margin_score(prediction: ClassPrediction) -> torch.Tensor:
        best = prediction.probs.topk(2).values
        return 1 - (best[:, 0] - best[:, 1])

    x_train = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = predict(x_train).predicted()
    figure = plots.class_uncertainty_map(predict, x_train, labels, score=margin_score, resolution=90)
    numbers = [text.get_text() for text in figure.axes[0].texts]
    assert numbers == [str(c) for c in labels.unique().tolist()]
    assert not figure.legends
    assert figure.axes[2].get_ylabel() == "margin_score"
    styles = {(line.get_color(), line.get_marker()) for line in figure.axes[0].lines}
    assert len(styles) == len(numbers)


def test_map_of_points_on_a_line_and_of_an_uncertainty_that_is_zero() -> None:
    flat = torch.tensor([[0.0, 3.0], [2.0, 3.0]])
    one = lambda x: ClassPrediction.from_logits(x[:, :1].unsqueeze(0), binary=True)  # noqa: E731
    figure = plots.class_uncertainty_map(
        one, flat, torch.tensor([0, 1]), score="functional_variance", resolution=5
    )
    assert figure.axes[0].get_ylim() == pytest.approx((2.375, 3.625))
    assert float(np.max(figure.axes[1].images[0].get_array())) == 0
    with pytest.raises(PosthocUQError, match="no positive score"):
        plots.class_uncertainty_map(
            one, flat, torch.tensor([0, 1]), score="functional_variance", resolution=5, log=True
        )


@pytest.mark.parametrize("name", ["entropy", "mutual_information", "max_probability", "variation_ratio"])
def test_map_knows_scores_by_name_and_by_method(name: str) -> None:
    figure = plots.class_uncertainty_map(_linear(4), *_points(4), score=name, resolution=7, margin=0)
    x_train = _points(4)[0]
    axes = [torch.linspace(float(x_train[:, i].min()), float(x_train[:, i].max()), 7) for i in range(2)]
    grid = torch.cartesian_prod(axes[1], axes[0]).flip(-1)
    with torch.no_grad():
        prediction = _linear(4)(grid)
    values = getattr(prediction, name)()
    expected = 1 - values if name == "max_probability" else values
    np.testing.assert_allclose(figure.axes[1].images[0].get_array(), expected.reshape(7, 7), atol=1e-5)
    by_method = plots.class_uncertainty_map(
        _linear(4), *_points(4), score=ClassPrediction.expected_entropy, resolution=7
    )
    assert by_method.axes[2].get_ylabel() == "expected_entropy"


def test_wrong_input_is_one_clear_error() -> None:
    two = _linear(2)
    points, labels = _points(2)

    def drawn(predict=two, points=points, labels=labels, **options):
        return lambda: plots.class_uncertainty_map(predict, points, labels, **{"resolution": 5, **options})

    cases = [
        (drawn(points=points[:, :1]), r"x_train must be \(points, 2\), not \(40, 1\)"),
        (drawn(points=points[:0], labels=labels[:0]), r"x_train must be"),
        (drawn(points=points * math.inf), "x_train holds numbers that are not finite"),
        (drawn(labels=labels.float()), "y_train must be 40 integers"),
        (drawn(labels=labels - 1), "from 0 on, not -1"),
        (drawn(labels=labels + 1), "holds class 2, but predict knows 2 classes only"),
        (drawn(score="confidence"), "score must be one of .*'entropy'.* not 'confidence'"),
        (drawn(score=lambda prediction: prediction.probs), r"scores of shape \(25, 2\)"),
        (drawn(score=lambda prediction: prediction.entropy() * math.nan), "not finite; try a smaller"),
        (drawn(margin=-0.1), "margin that is not negative"),
        (drawn(predict=lambda x: x), "must return a ClassPrediction, not Tensor"),
        (drawn(resolution=1), "at least 2"),
    ]
    for call, message in cases:
        with pytest.raises(PosthocUQError, match=message):
            call()
