"""The recipe language: its texts, and its smoke mode as a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recipe_helpers import recipe_modules, smoke


@pytest.mark.study
def test_texts() -> None:
    text = recipe_modules("language", ["text"]).text
    texts = text.read(20_000)
    assert min(map(len, (texts.prose, texts.held_prose, texts.code, texts.held_code))) == 20_000
    ids = text.encoded(texts.held_prose)
    assert text.decoded(ids) == texts.held_prose and int(ids.max()) < len(text.ALPHABET)
    strange = texts.strange()
    assert sorted(strange["shuffled"]) == sorted(texts.held_prose) and "self" not in strange["other letters"]
    pieces = text.sequences(texts.code, 16, 5)
    assert pieces.shape == (5, 16) and text.decoded(pieces[0]) == texts.code[:16]


@pytest.mark.study
def test_smoke(tmp_path: Path) -> None:
    smoke("language.run", "--output", tmp_path)
    assert (tmp_path / "novelty.png").exists()
    rows = json.loads((tmp_path / "language.json").read_text())
    assert set(rows) == {"prose", "code"} and "LoRA, KFAC, linearised" in rows["code"]
    for table in rows.values():
        assert all(0 < row["NLL"] < 6 and 0 <= row["ECE"] <= 1 for row in table.values())
    assert "code, novelty, sequence" in rows["prose"]["last layer, INF, linearised"]
