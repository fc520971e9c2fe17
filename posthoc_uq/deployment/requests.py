"""Bodies of requests to model inputs, within limits. Nothing is written to a disk on the way."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from posthoc_uq.core.errors import out_of_memory
from posthoc_uq.core.paths import UNKNOWN, too_long

_IMAGES = 8  # of the largest size, that a form may hold: decoding takes a second or two each
_SCANS = 100  # of a JPEG file; progressive ones have about ten
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
BUSY = "The server is busy; try again in a second."
_ARRIVING = 4  # times the queue's length, so many bodies may be on their way
_PART = 2**20  # bytes of a form that are parsed at once
IMAGE_TYPES = {"image/png": "PNG", "image/jpeg": "JPEG"}


class Refused(Exception):
    """A request that gets no prediction.

    Args:
        status: of the HTTP answer, 4xx, or 503 where the server is busy.
        kind: one word, for the metrics.
        sentence: what is wrong and what would be right.
    """

    def __init__(self, status: int, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.kind, self.sentence = status, kind, sentence


def shortened(text: object, length: int = 300) -> str:
    """A message of another library in one line."""
    line = " ".join(str(text).split()).rstrip(".")
    return line if len(line) <= length else line[:length] + " ..."


@dataclass(frozen=True)
class Limits:
    """What one request may hold.

    Attributes:
        bytes: of its body.
        batch: inputs.
        pixels: of one image, width times height, before it is decoded, and where resizing makes a strip of it; and
            of all images of a form once they are prepared, at three numbers each.
        seconds: that its body may take to arrive.
        shorter: pixels to which the transform resizes the shorter side of an image, or 0 where it keeps the size.
        queue: requests under way, each with its whole body; more are told to come again.
    """

    bytes: int = 16 * 2**20
    batch: int = 64
    pixels: int = 40_000_000
    seconds: float = 30.0
    shorter: int = UNKNOWN
    queue: int = 64


class Bodies:
    """Bodies of requests, bounded together: those on their way, and those of requests under way. Slow ones hold no
    place in the queue; where one more would be too many, that which has been arriving for longest is given up.

    Args:
        limits: of one request, and of their number.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self._most = limits, _ARRIVING * limits.queue
        self._bytes = limits.queue * limits.bytes
        self._held = 0  # bytes of all
        self._arriving: dict[_Arriving, asyncio.Task[bytes]] = {}  # the oldest first

    @asynccontextmanager
    async def whole(self, request: Request) -> AsyncGenerator[bytes]:
        """The body of a request. It counts until the end of the block.

        Raises:
            Refused: it is too large or too slow, or was given up.
        """
        arriving, held = _Arriving(), 0
        task = self._arriving[arriving] = asyncio.ensure_future(self._arrive(request, arriving))
        self._make_room()
        try:
            await asyncio.wait({task}, timeout=self._limits.seconds)
            if not task.done():
                raise Refused(
                    408,
                    "slow",
                    f"The request's body took longer than {self._limits.seconds:g} seconds to arrive.",
                )
            if task.cancelled():
                raise Refused(503, "busy", BUSY)
            body = task.result()
            self._give_up(arriving)
            held = len(body)
            self._held += held
            yield body
        finally:
            self._give_up(arriving)
            self._held -= held

    async def _arrive(self, request: Request, arriving: _Arriving) -> bytes:
        async for part in _limited(request, self._limits):
            arriving.parts.append(part)
            if arriving in self._arriving:
                self._held += len(part)
                self._make_room()
        return b"".join(arriving.parts)

    def _make_room(self) -> None:
        while self._arriving and (self._held > self._bytes or len(self._arriving) > self._most):
            self._give_up(next(iter(self._arriving)))

    def _give_up(self, arriving: _Arriving) -> None:
        """End one that is on its way, if it still is, and free its memory at once."""
        task = self._arriving.pop(arriving, None)
        if task is not None:
            task.cancel()
            self._held -= sum(map(len, arriving.parts))
            arriving.parts.clear()


class _Arriving:
    """What has come of a body."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []


async def _limited(request: Request, limits: Limits) -> AsyncGenerator[bytes, None]:
    sentence = f"The request is larger than {limits.bytes:,} bytes, the limit (--max-bytes)."
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.bytes:
        raise Refused(413, "size", sentence)
    total = 0
    try:
        async for part in request.stream():
            total += len(part)
            if total > limits.bytes:
                raise Refused(413, "size", sentence)
            yield part
    except ClientDisconnect:
        raise Refused(400, "disconnect", "The request ended before its body was complete.") from None


def files_of(body: bytes, headers: Headers, limits: Limits) -> list[bytes]:
    """The files of a form, in memory. Called outside of the event loop, for a form of many parts takes seconds.

    Raises:
        Refused: the form cannot be read, or has no file.
    """

    async def parts() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), _PART):
            yield body[start : start + _PART]

    parser = MultiPartParser(
        headers, parts(), max_files=limits.batch, max_fields=0, max_part_size=limits.bytes
    )
    parser.spool_max_size = limits.bytes + 1  # files stay in memory; the body's limit bounds them
    try:
        form = asyncio.run(parser.parse())
    except (MultiPartException, KeyError, ValueError) as error:  # the parser's own errors are ValueErrors
        reason = "it names no boundary" if isinstance(error, KeyError) else getattr(error, "message", error)
        status, kind = (413, "size") if str(reason).startswith("Too many files") else (400, "form")
        raise Refused(status, kind, f"The form cannot be read: {shortened(reason)}.") from None
    uploads = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    if not uploads:
        raise Refused(400, "form", "The form has no file; send images as files (curl -F image=@photo.jpg).")
    return [upload.file.read() for upload in uploads]


def numbers_of(body: bytes, many: bool, limits: Limits, dtype: torch.dtype) -> Tensor:
    """Inputs from JSON: ``{"input": nested lists}``, or ``{"inputs": [one, another, ...]}`` for `many`.

    Returns:
        (batch, ...), on the CPU.

    Raises:
        Refused: it is anything else.
    """
    key = "inputs" if many else "input"
    form = f'send {{"{key}": ...}} with nested lists of numbers'
    try:
        content = json.loads(body, parse_constant=_not_finite)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "json", f"The body is not JSON ({shortened(error, 120)}); {form}.") from None
    if not isinstance(content, dict) or set(cast(dict[str, Any], content)) != {key}:
        raise Refused(400, "json", f"The body must be a JSON object with the one key {key!r}; {form}.")
    value: Any = cast(dict[str, Any], content)[key]
    if many and (not isinstance(value, list) or not value):
        raise Refused(400, "numbers", f"'inputs' must be a list of one input or more; {form}.")
    if many and len(cast(list[Any], value)) > limits.batch:
        raise Refused(
            413,
            "size",
            f"The batch has {len(cast(list[Any], value))} inputs, and the limit is {limits.batch} (--max-batch).",
        )
    try:
        array: Any = np.asarray(value)
    except (ValueError, RecursionError, OverflowError):
        raise Refused(
            400,
            "numbers",
            f"The lists of '{key}' differ in length at one depth, or are nested too deep; {form}.",
        ) from None
    if array.dtype.kind not in "iuf" or array.size == 0:
        raise Refused(400, "numbers", f"'{key}' must hold numbers alone, and one at least; {form}.")
    if dtype == torch.int64 and array.dtype.kind == "f":
        raise Refused(400, "numbers", f"'{key}' must hold whole numbers for this model (--integers).")
    tensor = torch.from_numpy(array if array.dtype != np.uint64 else array.astype(np.float64)).to(dtype)
    if not bool(torch.isfinite(tensor).all()):
        raise Refused(
            400, "numbers", f"'{key}' has a number that is too large for {dtype}; scale the inputs."
        )
    return tensor if many else tensor.unsqueeze(0)


def _not_finite(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def opened_image(content: bytes, limits: Limits, kind: str | None = None) -> Image.Image:
    """A decoded PNG or JPEG file.

    Args:
        content: of the file.
        limits: its size is checked before it is decoded.
        kind: the format that the request named, or None for either.

    Raises:
        Refused: it is none, is damaged, has too many pixels, is a strip that resizing would make huge, or takes too
            long to decode.
    """
    bomb = f"(width times height); the limit is {limits.pixels:,} (--max-pixels)."
    try:
        image = Image.open(BytesIO(content), formats=(kind,) if kind else tuple(IMAGE_TYPES.values()))
        if image.width * image.height > limits.pixels:
            raise Refused(413, "pixels", f"The image has {image.width * image.height:,} pixels {bomb}")
        if fault := too_long(image.width, image.height, limits.shorter, limits.pixels):
            raise Refused(413, "pixels", f"The image {fault}.")
        if image.format != "PNG" and (scans := _scans(content)) > _SCANS:
            raise Refused(413, "pixels", f"The JPEG file has {scans:,} scans; the limit is {_SCANS}.")
        image.load()
        return image
    except Image.DecompressionBombError:
        raise Refused(413, "pixels", f"The image has far too many pixels {bomb}") from None
    except UnidentifiedImageError:
        raise Refused(415, "image", f"The file is no {kind or 'PNG or JPEG'} image.") from None
    except Refused:
        raise
    except Exception as error:  # decoders raise many types for damaged files
        if out_of_memory(error):
            raise
        raise Refused(400, "image", f"The image cannot be decoded: {shortened(error, 120)}.") from None


def _scans(content: bytes) -> int:
    """How often a JPEG file goes over its pixels: a few bytes each, so thousands would keep a thread busy for hours."""
    count, place = 0, 2
    while (found := _MARKER.search(content, place)) is not None and found[0] != b"\xff\xd9":
        count += found[0] == b"\xff\xda"
        # every segment says how long it is; the data of a scan, which follow one, hold no markers
        place = found.end() + max(2, int.from_bytes(content[found.end() : found.end() + 2], "big"))
    return count


def prepared(
    files: Sequence[bytes], transform: Callable[[Image.Image], Any], limits: Limits, kind: str | None = None
) -> Tensor:
    """Image files as a batch of inputs; one image at a time is decoded, so that memory does not grow with their number.

    Raises:
        Refused: `opened_image` refuses one, the transform fails on it, or they differ in size afterwards, or are too
            large together.
    """
    batch: Tensor | None = None
    pixels = 0
    for index, file in enumerate(files):
        image = opened_image(file, limits, kind)
        pixels += image.width * image.height
        if pixels > _IMAGES * limits.pixels:
            raise Refused(
                413,
                "pixels",
                f"The images have more than {_IMAGES * limits.pixels:,} pixels together, the limit ({_IMAGES} times "
                f"--max-pixels); send fewer at once.",
            )
        tensor = prepared_image(image, transform)
        del image  # before the next one is decoded
        if len(files) == 1:
            return tensor.unsqueeze(0)
        if batch is None:
            if tensor.numel() * len(files) > 3 * limits.pixels:
                raise Refused(
                    413,
                    "pixels",
                    f"{len(files)} images of {tuple(tensor.shape)} are more than {3 * limits.pixels:,} numbers, the "
                    f"limit (three times --max-pixels); send fewer at once.",
                )
            batch = tensor.new_empty((len(files), *tensor.shape))
        if tensor.shape != batch.shape[1:]:
            shapes = sorted((tuple(tensor.shape), tuple(batch.shape[1:])))
            raise Refused(
                422,
                "image",
                f"Images of one batch differ in size, {shapes[0]} and {shapes[1]}; send them one by one, or start the "
                f"server with --image-size.",
            )
        batch[index] = tensor
    assert batch is not None  # a form without a file is refused before
    return batch


def prepared_image(image: Image.Image, transform: Callable[[Image.Image], Any]) -> Tensor:
    """One image as an input.

    Raises:
        Refused: the transform fails on it.
    """
    try:
        return transform(image)
    except Exception as error:  # a user's transform may raise anything
        if out_of_memory(error):
            raise
        raise Refused(422, "image", f"The transform fails on the image: {shortened(error)}.") from None
