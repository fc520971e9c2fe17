"""Measurements kept as files, one a row, so that an interrupted benchmark goes on where it was."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import posthoc_uq


@cache
def library_version() -> str:
    """A digest of the library's source: rows of another one are measured again."""
    digest = hashlib.sha256()
    folder = Path(posthoc_uq.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


class Rows:
    """Rows by what was measured.

    Args:
        folder: where they are kept.
        keep: take rows that an earlier version of the library gave.
        measure: False takes what is there alone.
    """

    def __init__(self, folder: Path, keep: bool = False, measure: bool = True) -> None:
        self.folder, self._keep, self._measure = folder, keep, measure
        self.missing: dict[str, str] = {}
        self.versions: set[str] = set()

    def row(
        self, key: dict[str, Any], measure: Callable[[], dict[str, Any]], library: bool = True
    ) -> dict[str, Any] | None:
        """One row, from its file or measured; None where it cannot be.

        Args:
            key: plain values that say what is measured.
            measure: gives the row. A package that is not installed leaves the row out and its name in `missing`; any
                other error is kept as the row ``{"error": ...}``, for a default that fails has failed.
            library: whether the row depends on this library's source.
        """
        version = library_version() if library else ""
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        path = self.folder / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            if self._keep or found["version"] == version:
                self.versions |= {found["version"]} - {""}
                return found["row"]
        if not self._measure:
            return None
        try:
            row = measure()
        except ImportError as error:
            self.missing[str(error.name)] = (
                f"rows left out because {error.name} is not installed, such as {key}"
            )
            return None
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:500]}
            traceback.print_exc()
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".part")
        fresh.write_text(json.dumps({"key": key, "version": version, "row": row}))
        fresh.replace(path)
        self.versions |= {version} - {""}
        return row
