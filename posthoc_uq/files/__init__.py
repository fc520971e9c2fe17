"""Posteriors in files: `save`, `load` and `inspect`; the schema is in ``docs/format.md``."""

from typing import TYPE_CHECKING

from posthoc_uq.core.registry import names_of

if TYPE_CHECKING:
    from posthoc_uq.files.check import check_numbers, check_settings
    from posthoc_uq.files.match import (
        buffers_fingerprint,
        check_match,
        check_unchanged,
        fingerprint,
        others_fingerprint,
        parameters_of,
    )
    from posthoc_uq.files.save_load import inspect, load, save

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

OFFERED = {
    "match": "buffers_fingerprint check_match check_unchanged fingerprint others_fingerprint parameters_of",
    "check": "check_numbers check_settings",
    "save_load": "inspect load save",
    # a file is there as a whole or not at all
    "atomic": "checked_target remove_leftovers replacing",
    "header": "SNAPSHOT_MAGIC open_regular",
}
"""By file, the names that come on first use."""

__getattr__ = names_of(__name__, OFFERED)
