"""Scores of predictions against observed targets: Python floats, and named tuples of tensors for curves.

torchmetrics computes every metric that it has. It is imported inside the functions: it takes seconds to load,
which a program that only predicts should not wait for. Everything is evaluated on
the CPU, from float64 values, and no function draws random numbers. A NaN is refused with a `NonFiniteError`
rather than counted as a wrong answer, or a right one.
"""

from posthoc_uq.metrics.calibration import (
    BINNINGS,
    Binning,
    CalibrationBins,
    calibration_bins,
    classwise_calibration_error,
    expected_calibration_error,
)
from posthoc_uq.metrics.classification import (
    accuracy,
    brier_score,
    negative_log_likelihood,
    top_k_accuracy,
)
from posthoc_uq.metrics.multilabel import (
    f1_score,
    hamming_loss,
    mean_average_precision,
    multilabel_brier_score,
    multilabel_calibration_error,
)
from posthoc_uq.metrics.ood import ood_aupr, ood_auroc, ood_fpr
from posthoc_uq.metrics.ordinal import quadratic_kappa, ranked_probability_score
from posthoc_uq.metrics.regression import (
    CoverageCurve,
    coverage_curve,
    crps_gaussian,
    gaussian_log_density,
    interval_coverage,
    interval_sharpness,
    mae,
    rmse,
)
from posthoc_uq.metrics.selective import (
    RiskCoverage,
    referral_threshold,
    retained,
    risk_coverage,
    selective_accuracy,
    selective_accuracy_area,
    selective_auc,
)
from posthoc_uq.metrics.tails import (
    Tail,
    joint_tail,
    referral_thresholds,
    tail_of,
    tail_probability,
)

__all__ = [
    "BINNINGS",
    "Binning",
    "CalibrationBins",
    "CoverageCurve",
    "RiskCoverage",
    "Tail",
    "accuracy",
    "brier_score",
    "calibration_bins",
    "classwise_calibration_error",
    "coverage_curve",
    "crps_gaussian",
    "expected_calibration_error",
    "f1_score",
    "gaussian_log_density",
    "hamming_loss",
    "interval_coverage",
    "interval_sharpness",
    "joint_tail",
    "mae",
    "mean_average_precision",
    "multilabel_brier_score",
    "multilabel_calibration_error",
    "negative_log_likelihood",
    "ood_aupr",
    "ood_auroc",
    "ood_fpr",
    "quadratic_kappa",
    "ranked_probability_score",
    "referral_threshold",
    "referral_thresholds",
    "retained",
    "risk_coverage",
    "rmse",
    "selective_accuracy",
    "selective_accuracy_area",
    "selective_auc",
    "tail_of",
    "tail_probability",
    "top_k_accuracy",
]
