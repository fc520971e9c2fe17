"""Which kinds of blocks the posteriors of a method are made of, by the method's name.

Storage must know the names of the methods, but may not import ``methods``, which stands above it; so ``methods`` fills
this table.
"""

from __future__ import annotations

FAMILIES: dict[str, tuple[str, ...]] = {}
