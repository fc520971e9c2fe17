"""Which kinds of blocks the posteriors of a method are made of, by the method's name.

Methods stand far above files, which must know their names to tell a posterior's file from another: ``methods`` fills
this table.
"""

from __future__ import annotations

FAMILIES: dict[str, tuple[str, ...]] = {}
