"""Thumbnails of the most novel inputs: a bounded number of them, in memory, and in a folder if there is one."""

from __future__ import annotations

import heapq
import re
import uuid
import warnings
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Lock

import numpy as np
from PIL import Image

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.files import IMAGE_FORMATS
from posthoc_uq.monitoring.records import Records

SIDE = 128  # pixels of a thumbnail's longer side
_PIXELS = 200_000_000  # of a file that is opened for one
_NAME = re.compile(r"^(\d\.\d{6}e[+-]\d\d)-[0-9a-f]{32}\.png$")


@dataclass(frozen=True, order=True)
class Picture:
    """One thumbnail.

    Attributes:
        score: how novel the input was.
        label: what was predicted.
        png: the picture.
    """

    score: float
    label: str
    png: bytes

    @property
    def small(self) -> bool:
        """Whether it has so few pixels that they are better shown as squares than smoothed."""
        return max(int.from_bytes(self.png[start : start + 4], "big") for start in (16, 20)) < 100


class Pictures:
    """The `size` thumbnails of the largest score; others are deleted.

    Args:
        size: how many.
        folder: where they are kept too; those of an earlier run count.

    Raises:
        PosthocUQError: the folder cannot be made.
    """

    def __init__(self, size: int, folder: Path | None = None) -> None:
        self._size, self._folder, self._lock = size, folder, Lock()
        self._heap: list[tuple[float, str, Picture]] = []
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for file in folder.iterdir():
                matched = _NAME.match(file.name)
                if matched:
                    score = float(matched.group(1))
                    self._keep(score, file.name, Picture(score, "", file.read_bytes()))
        except OSError as error:
            raise PosthocUQError(f"Thumbnails cannot be kept in '{folder}': {error}.") from error

    def wants(self, score: float) -> bool:
        """Whether a picture of this score would be kept."""
        with self._lock:
            return score == score and (len(self._heap) < self._size or score > self._heap[0][0])

    def add(self, image: Image.Image, score: float, label: str) -> str:
        """Keep a thumbnail of an image if it is novel enough; its path as seen from beside the folder, or nothing."""
        if not self.wants(score):
            return ""
        png = thumbnail(image)
        name = f"{score:.6e}-{uuid.uuid4().hex}.png"
        with self._lock:
            if self._folder is not None:
                (self._folder / name).write_bytes(png)
            kept = self._keep(score, name, Picture(score, label, png))
        return f"{self._folder.name}/{name}" if kept and self._folder is not None else ""

    def _keep(self, score: float, name: str, picture: Picture) -> bool:
        heapq.heappush(self._heap, (score, name, picture))
        if len(self._heap) <= self._size:
            return True
        _, dropped, _ = heapq.heappop(self._heap)
        if self._folder is not None:
            (self._folder / dropped).unlink(missing_ok=True)
        return dropped != name

    def largest(self) -> list[Picture]:
        """All of them, the most novel first."""
        with self._lock:
            return [picture for _, _, picture in sorted(self._heap, key=lambda entry: -entry[0])]


def thumbnail(image: Image.Image) -> bytes:
    """A small PNG of an image, without what else its file said."""
    small = image.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    plain = Image.frombytes("RGB", small.size, small.tobytes())
    buffer = BytesIO()
    plain.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def pictures_of(records: Records, folders: list[Path], size: int) -> list[Picture]:
    """The most novel inputs of a CSV whose files exist, in one of the folders or by their own path, and are images."""
    score = records.novelty_score
    if score is None:
        return []
    values = records.scores[score]
    found: list[Picture] = []
    for index in np.argsort(-values, kind="stable"):  # NaN comes last
        if len(found) == size or np.isnan(values[index]):
            break
        png = _read(records.files[index], folders)
        if png is not None:
            found.append(Picture(float(values[index]), records.labels[index], png))
    return found


def _read(name: str, folders: list[Path]) -> bytes | None:
    if not name:
        return None
    file = next((path for folder in folders if (path := folder / name).is_file()), None)
    if file is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(file, formats=IMAGE_FORMATS) as image:
                if image.width * image.height > _PIXELS:
                    return None
                return thumbnail(image)
    except Exception:  # decoders raise many types; a picture less is no fault of the page
        return None
