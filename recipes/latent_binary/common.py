"""Where output goes, and where the data of `recipes/fashion_mnist` and what all recipes share are found."""

from __future__ import annotations

import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1]
OUTPUT = RECIPES / "output" / "latent_binary"

sys.path += [str(RECIPES / "fashion_mnist"), str(RECIPES)]  # its files; their smoke modes
