"""Figures of predictions and posteriors; every function returns a matplotlib `Figure` with `savefig`.

The figures are built without pyplot, so nothing is registered globally, no window opens and the caller's
backend, style and open figures stay as they are. Colours are those of Okabe and Ito ("Color Universal
Design", 2008), which colour-blind readers can tell apart; lines differ by marker or dash as well.

matplotlib is loaded when the first figure is asked for, not with the package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posthoc_uq.evaluation.plots.calibration import coverage_plot, reliability_diagram
    from posthoc_uq.evaluation.plots.maps import class_uncertainty_map
    from posthoc_uq.evaluation.plots.regression import regression_band
    from posthoc_uq.evaluation.plots.scores import score_histograms
    from posthoc_uq.evaluation.plots.selective import referral_plot, risk_coverage_plot

__all__ = [
    "class_uncertainty_map",
    "coverage_plot",
    "referral_plot",
    "regression_band",
    "reliability_diagram",
    "risk_coverage_plot",
    "score_histograms",
]

_MODULES = {
    "class_uncertainty_map": "maps",
    "coverage_plot": "calibration",
    "referral_plot": "selective",
    "regression_band": "regression",
    "reliability_diagram": "calibration",
    "risk_coverage_plot": "selective",
    "score_histograms": "scores",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
