"""Calibration errors of class probabilities, in bins of equal width or of equal mass.

Bins of equal width are [k / bins, (k + 1) / bins), the last one closed. Bins of equal mass hold the same number
of inputs, up to one; inputs of equal confidence always share the bin of the first of them in ascending
order, so that the order of the inputs does not matter.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.metrics.checks import classified
from posthoc_uq.values import one_of

Binning = Literal["equal_width", "equal_mass"]
"""How confidences are cut into bins."""
BINNINGS: tuple[str, ...] = get_args(Binning)


class CalibrationBins(NamedTuple):
    """Per bin, each (bins,): mean confidence and accuracy (NaN where the bin is empty), and counts."""

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


def expected_calibration_error(
    probs: Tensor, labels: Tensor, bins: int = 15, binning: Binning = "equal_width"
) -> float:
    """Mean gap between confidence and accuracy over bins of confidence, weighted by the share of inputs.

    `sum_b n_b / n |accuracy_b - confidence_b|`, the confidence being the largest probability (Guo et al.,
    "On Calibration of Modern Neural Networks", ICML 2017). Where most confidences are near 1, bins of equal
    width leave most bins nearly empty; those of equal mass do not (Nixon et al., "Measuring Calibration in
    Deep Learning", CVPR workshops 2019).

    Args:
        probs: (inputs, classes).
        labels: (inputs,), integers.
        bins: number of bins.
        binning: "equal_width" or "equal_mass".

    Raises:
        PosthocUQError: probs and labels that do not fit, fewer than one bin, an unknown binning.
        NonFiniteError: a probability is NaN.
    """
    from torchmetrics.functional.classification import multiclass_calibration_error

    probs, labels = classified(probs, labels)
    _check_bins(bins, binning)
    if binning == "equal_mass":
        confidence, predicted = probs.max(dim=-1)
        return _gap(_binned(confidence, predicted == labels, bins, binning))
    # torchmetrics puts a confidence of exactly 1 into a separate bin, and treats numbers as logits if one is above 1,
    # be it by rounding
    below_one = 1 - torch.finfo(torch.float32).eps / 2
    return multiclass_calibration_error(
        probs.clamp(0, below_one), labels, num_classes=probs.shape[1], n_bins=bins, norm="l1"
    ).item()


def calibration_bins(
    probs: Tensor, labels: Tensor, bins: int = 15, binning: Binning = "equal_width"
) -> CalibrationBins:
    """The bins behind `expected_calibration_error`, for reliability diagrams; same arguments, same errors."""
    probs, labels = classified(probs, labels)
    _check_bins(bins, binning)
    confidence, predicted = probs.max(dim=-1)
    return _binned(confidence, predicted == labels, bins, binning)


def classwise_calibration_error(
    probs: Tensor, labels: Tensor, bins: int = 15, binning: Binning = "equal_width"
) -> float:
    """How far every class's probability is from the class's frequency, not only the largest one's.

    `1 / C sum_c sum_b n_cb / n |frequency_cb - probability_cb|`, where the bins of class c are over the
    probabilities of class c of all n inputs: the static calibration error of Nixon et al. ("Measuring
    Calibration in Deep Learning", CVPR workshops 2019), the classwise-ECE of Kull et al. ("Beyond temperature
    scaling", NeurIPS 2019); with bins of equal mass Nixon's adaptive calibration error. With many classes it is
    small because most probabilities are small: compare models on the same data only.

    Args, Raises: as `expected_calibration_error`.
    """
    probs, labels = classified(probs, labels)
    _check_bins(bins, binning)
    columns = probs.T.contiguous()
    gaps = [_gap(_binned(column, labels == c, bins, binning)) for c, column in enumerate(columns)]
    return sum(gaps) / len(gaps)


def _binned(confidence: Tensor, hits: Tensor, bins: int, binning: Binning) -> CalibrationBins:
    """Means of `confidence` and of `hits`, both (inputs,), in each bin."""
    if binning == "equal_width":
        edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device="cpu")
        index = (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, bins - 1)
    else:
        smaller = torch.searchsorted(confidence.sort().values, confidence)
        index = smaller * bins // len(confidence)
    counts = torch.bincount(index, minlength=bins)
    mean_confidence = torch.bincount(index, weights=confidence, minlength=bins) / counts
    mean_accuracy = torch.bincount(index, weights=hits.double(), minlength=bins) / counts
    return CalibrationBins(mean_confidence, mean_accuracy, counts)


def _gap(parts: CalibrationBins) -> float:
    gaps = (parts.accuracy - parts.confidence).abs().nan_to_num()
    return (gaps * parts.counts).sum().item() / int(parts.counts.sum())


def _check_bins(bins: int, binning: str) -> None:
    if bins < 1:
        raise PosthocUQError(f"A calibration needs at least one bin, not {bins}.")
    one_of("binning", binning, BINNINGS)
