"""Posteriors in files: `save`, `load` and `inspect`; the schema is in ``docs/format.md``."""

from posthoc_uq.files.match import (
    buffers_fingerprint,
    check_match,
    check_unchanged,
    fingerprint,
    others_fingerprint,
    parameters_of,
)
from posthoc_uq.files.save_load import check_numbers, check_settings, inspect, load, save

__all__ = [
    "buffers_fingerprint",
    "check_match",
    "check_numbers",
    "check_settings",
    "check_unchanged",
    "fingerprint",
    "inspect",
    "load",
    "others_fingerprint",
    "parameters_of",
    "save",
]
