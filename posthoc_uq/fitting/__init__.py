"""What a user calls: fit, tune, update, wrap."""

from posthoc_uq.fitting.fit import fit
from posthoc_uq.fitting.tune import tune
from posthoc_uq.fitting.update import update
from posthoc_uq.fitting.wrap import wrap

__all__ = ["fit", "tune", "update", "wrap"]
