"""What a user calls: fit, tune, calibrate, update, wrap."""

from posthoc_uq.fitting.calibrate import Calibration, calibrate
from posthoc_uq.fitting.fit import fit
from posthoc_uq.fitting.tune import tune
from posthoc_uq.fitting.update import update
from posthoc_uq.fitting.wrap import wrap

__all__ = ["Calibration", "calibrate", "fit", "tune", "update", "wrap"]
