"""Figures of predictions; every function returns a matplotlib `Figure` with `savefig`.

The figures are built without pyplot, so nothing is registered globally, no window opens and the caller's
backend, style and open figures stay as they are. Colours are those of Okabe and Ito ("Color Universal
Design", 2008), which colour-blind readers can tell apart; lines differ by marker or dash as well.
"""

from posthoc_uq.plots.calibration import coverage_plot, reliability_diagram
from posthoc_uq.plots.maps import class_uncertainty_map
from posthoc_uq.plots.regression import regression_band
from posthoc_uq.plots.scores import score_histograms
from posthoc_uq.plots.selective import referral_plot, risk_coverage_plot

__all__ = [
    "class_uncertainty_map",
    "coverage_plot",
    "referral_plot",
    "regression_band",
    "reliability_diagram",
    "risk_coverage_plot",
    "score_histograms",
]
