"""The texts: docstrings and code of Python's own library, and strange versions of them, as characters."""

from __future__ import annotations

import ast
import codecs
import inspect
import os
import random
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""The vocabulary: a newline and the printable characters of ASCII; a character's place is its number."""

_LIBRARY = Path(os.__file__).parent
_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
    "dist-packages",
    "lib2to3",
    "__pycache__",
    "turtledemo",
}


@dataclass(frozen=True)
class Texts:
    """Training text and held-out texts, as long strings.

    Attributes:
        prose: docstrings to train on.
        held_prose: docstrings of other modules.
        code: functions to fine-tune on, without their docstrings.
        held_code: functions of other modules.
    """

    prose: str
    held_prose: str
    code: str
    held_code: str

    def strange(self) -> dict[str, str]:
        """Texts that no model here was trained on: every letter another one (a language of its own, with English
        spaces and marks), and all characters of the prose in random order.
        """
        letters = list(self.held_prose)
        random.Random(0).shuffle(letters)
        return {"other letters": codecs.encode(self.held_prose, "rot13"), "shuffled": "".join(letters)}


def read(most: int = 2_000_000) -> Texts:
    """The texts of this Python; which module belongs to which part is decided by a hash of its name.

    Args:
        most: characters of the training text.
    """
    parts: dict[str, list[str]] = {"prose": [], "held_prose": [], "code": [], "held_code": []}
    for file in sorted(_LIBRARY.rglob("*.py")):
        inside = file.relative_to(_LIBRARY)
        if min(map(_characters, parts.values())) > most:
            break
        if _LEFT_OUT & set(inside.parts[:-1]):
            continue
        held = "held_" if sha256(inside.as_posix().encode()).digest()[0] < 40 else ""
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        prose, code = _taken_apart(tree)
        parts[held + "prose"] += prose
        parts[held + "code"] += code
    joined = {name: plain("\n\n".join(texts)) for name, texts in parts.items()}
    return Texts(**{name: text[:most] for name, text in joined.items()})


def _characters(texts: list[str]) -> int:
    return sum(map(len, texts))


def _taken_apart(tree: ast.Module) -> tuple[list[str], list[str]]:
    """The docstrings of a module, and its functions without theirs."""
    prose, code = [], []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is None:
                continue
            if len(text) > 120:
                prose.append(inspect.cleandoc(text))
            if isinstance(node, ast.FunctionDef) and len(node.body) > 3:
                code.append(ast.unparse([*node.body[1:]] if node.body[1:] else node))
    return prose, code


def plain(text: str) -> str:
    """A text of the alphabet's characters alone."""
    return "".join(letter for letter in text if letter in ALPHABET)


def encoded(text: str) -> Tensor:
    """The numbers of a text's characters, ``(characters,)`` int64."""
    places = {letter: place for place, letter in enumerate(ALPHABET)}
    return torch.tensor([places[letter] for letter in text])


def decoded(ids: Tensor) -> str:
    """The text of some numbers."""
    return "".join(ALPHABET[place] for place in ids.tolist())


def sequences(text: str, length: int, most: int) -> Tensor:
    """Pieces of a text at equal distances, ``(most, length)`` or fewer where the text is short."""
    ids = encoded(text)
    whole = ids[: len(ids) // length * length].reshape(-1, length)
    return whole[:: max(1, len(whole) // most)][:most]
