"""Bodies of requests to model inputs, within limits. Nothing is written to a disk on the way."""

from __future__ import annotations

import asyncio
import json
import re
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from pydantic_core import from_json
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from posthoc_uq.app.paths import UNKNOWN, too_long
from posthoc_uq.core.errors import out_of_memory

_MAX_FORM_IMAGES = 8  # of the largest size: decoding takes a second or two each
_MAX_NAMED = 6  # names that a message lists
_MAX_JPEG_SCANS = 100  # progressive files have about ten
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")


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
        pixels: of one image, width times height, before it is decoded and where resizing makes a strip of it. All
            images of a form may have eight times as many, and three numbers a pixel of one once they are prepared.
        seconds: that its body may take to arrive.
        shorter: pixels to which the transform resizes the shorter side of an image, or 0 where it keeps the size.
    """

    bytes: int = 16 * 2**20
    batch: int = 64
    pixels: int = 40_000_000
    seconds: float = 30.0
    shorter: int = UNKNOWN


async def body_of(request: Request, limits: Limits) -> bytes:
    """The whole body of a request.

    Raises:
        Refused: it is too large or too slow, or ended before it was complete.
    """

    loop, task, late = asyncio.get_running_loop(), asyncio.current_task(), False

    def end() -> None:
        nonlocal late
        late = True
        assert task is not None
        task.cancel()

    # a timer of our own: that of asyncio makes a task for each body, which costs as much as all else here
    timer, body = loop.call_later(limits.seconds, end), bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limits.bytes:
                raise Refused(
                    413, "size", f"The request is larger than {limits.bytes:,} bytes (--max-bytes)."
                )
        return bytes(body)
    except asyncio.CancelledError:
        if not late:
            raise
        getattr(task, "uncancel", int)()  # from Python 3.11 on
        sentence = f"The request's body took longer than {limits.seconds:g} seconds to arrive."
        raise Refused(408, "slow", sentence) from None
    except ClientDisconnect:
        raise Refused(400, "disconnect", "The request ended before its body was complete.") from None
    finally:
        timer.cancel()


def files_of(body: bytes, headers: Headers, limits: Limits) -> list[bytes]:
    """The files of a form, in memory. Called outside of the event loop, for a form of many parts takes seconds.

    Raises:
        Refused: the form cannot be read, or has no file.
    """

    async def whole() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(
        headers, whole(), max_files=limits.batch, max_fields=0, max_part_size=limits.bytes
    )
    parser.spool_max_size = limits.bytes + 1  # files stay in memory; the body's limit bounds them
    try:
        form = asyncio.run(parser.parse())
    except (MultiPartException, ValueError) as error:  # the parser's own errors are ValueErrors
        reason = shortened(getattr(error, "message", error))
        status, kind = (413, "size") if reason.startswith("Too many files") else (400, "form")
        raise Refused(status, kind, f"The form cannot be read: {reason}.") from None
    uploads = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    if not uploads:
        raise Refused(400, "form", "The form has no file; send images as files (curl -F image=@photo.jpg).")
    return [upload.file.read() for upload in uploads]


Inputs = dict[str, Tensor]
"""The inputs of some samples by their names, ``(samples, ...)`` each, on the CPU."""


@dataclass(frozen=True)
class Form:
    """What a model takes, by which numbers of JSON become its inputs.

    Attributes:
        types: the number type of every input, by its name.
        columns: names of the numbers of the one input, in their order; none where they have no names.
        named: whether the names of the inputs are known.
    """

    types: Mapping[str, torch.dtype]
    columns: tuple[str, ...] = ()
    named: bool = True

    @property
    def only(self) -> str | None:
        """The name of the one input; None where there are several."""
        return next(iter(self.types)) if len(self.types) == 1 else None

    def shown(self) -> str:
        """What a client sends for one sample, in words."""
        names = self.columns or tuple(self.types)
        listed = ", ".join(f"{json.dumps(name)}: ..." for name in names[:_MAX_NAMED])
        whole = f"{{{listed}{', ...' if len(names) > _MAX_NAMED else ''}}}"
        if self.only is None:
            return f"{whole} with nested lists of numbers"
        return "nested lists of numbers" + (f", or {whole} with a number each" if self.columns else "")


def inputs_of(body: bytes, many: bool, limits: Limits, form: Form) -> Inputs:
    """Inputs from JSON: ``{"input": one}``, or ``{"inputs": [one, another, ...]}`` for `many`. One is nested lists of
    numbers, or an object of them by the names of the model's inputs, or of numbers by the names of its columns. Such an
    object may be the whole body for one input.

    Raises:
        Refused: it is anything else.
    """
    key = "inputs" if many else "input"

    def wrong(what: str, kind: str = "numbers") -> Refused:
        return Refused(
            400, kind, f'{what}; send {{"{key}": {"[one, ...]" if many else "one"}}}, one: {form.shown()}.'
        )

    try:  # a quarter of the time of Python's own parser, which is most of what numbers take here
        content: Any = from_json(body.removeprefix(BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        odd = next((name for name in ("NaN", "Infinity") if name.encode() in body), None)
        reason = shortened(error, 120) if odd is None else f"{odd} is no number of JSON"
        raise wrong(f"The body is not JSON ({reason})", "json") from None
    names = {*form.types, *form.columns} if form.named and not many else set[str]()
    if isinstance(content, dict) and key not in content and names & set(cast(dict[str, Any], content)):
        content = {key: content}
    if not isinstance(content, dict) or set(cast(dict[str, Any], content)) != {key}:
        first = next(iter(cast(dict[str, Any], content)), key) if isinstance(content, dict) and names else key
        if first not in ("input", "inputs") and (form.columns or form.only is None):
            raise wrong(f"The body has {shortened(repr(first), 80)}, which the model does not take")
        raise wrong(f"The body must be a JSON object with the one key {key!r}", "json")
    values: Any = content[key] if many else [content[key]]
    if not isinstance(values, list) or not values:
        raise wrong("'inputs' must be a list of one input or more")
    rows = cast(list[Any], values)
    if len(rows) > limits.batch:
        sentence = f"The batch has {len(rows)} inputs, and the limit is {limits.batch} (--max-batch)."
        raise Refused(413, "size", sentence)
    truths = b"true" in body or b"false" in body
    objects = [cast(dict[str, Any], row) for row in rows if isinstance(row, dict)]
    if objects and len(objects) < len(rows):
        raise wrong(f"{key!r} has inputs with names and without")
    try:
        if not objects:
            if form.only is None:
                raise _Wrong(f"{key!r} must name the model's inputs")
            return {form.only: _tensor_of(rows, form.types[form.only], key, truths)}
        if not form.named:
            raise _Wrong(
                "This server does not know the names of the model's inputs, for its file does not say them"
            )
        if form.columns and form.only is not None and set(objects[0]) != {form.only}:
            of_columns = _by_name(objects, form.columns, key)
            columns = [
                _tensor_of(of_columns[name], form.types[form.only], name, truths) for name in form.columns
            ]
            long = next((name for name, c in zip(form.columns, columns, strict=True) if c.ndim > 1), None)
            if long is not None:
                raise _Wrong(f"{long!r} must be one number")
            return {form.only: torch.stack(columns, dim=1)}
        named = _by_name(objects, tuple(form.types), key)
        return {name: _tensor_of(named[name], dtype, name, truths) for name, dtype in form.types.items()}
    except _Wrong as error:
        raise wrong(str(error)) from None


_IN_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


class _Wrong(Exception):
    """What is wrong with numbers, in words."""


def _by_name(rows: Sequence[dict[str, Any]], names: Sequence[str], key: str) -> dict[str, list[Any]]:
    """The values of all rows by name; every row must have these names and no others."""
    for row in rows:
        stray = next((name for name in row if name not in names), None)
        lacking = next((name for name in names if name not in row), None)
        if stray is not None:
            raise _Wrong(f"{key!r} has {shortened(repr(stray), 80)}, which the model does not take")
        if lacking is not None:
            raise _Wrong(f"{key!r} lacks {lacking!r}")
    return {name: [row[name] for row in rows] for name in names}


def _has_truth(value: Any) -> bool:
    return (
        any(map(_has_truth, cast(list[Any], value))) if isinstance(value, list) else isinstance(value, bool)
    )


def _tensor_of(rows: list[Any], dtype: torch.dtype, name: str, truths: bool) -> Tensor:
    """The values of an input in all rows as a tensor ``(rows, ...)``; whole numbers never pass through floating-point
    ones.
    """
    try:
        array: Any = np.asarray(rows)
    except (ValueError, RecursionError, OverflowError):
        raise _Wrong(
            f"The lists of {name!r} differ in length (pad them to one length), or are nested too deep"
        ) from None
    kind = array.dtype.kind
    if dtype != torch.bool and truths and _has_truth(rows):  # which numpy takes for 1 among numbers
        kind = "b"
    if kind not in ("iufb" if dtype == torch.bool else "iuf") or array.size == 0:
        raise _Wrong(f"{name!r} must hold numbers alone, and one at least")
    if dtype.is_floating_point:
        if dtype in _IN_NUMPY:  # which does not hand the interpreter to another thread for so few numbers
            with np.errstate(over="ignore"):
                tensor = torch.from_numpy(array.astype(_IN_NUMPY[dtype], copy=False))
        else:
            tensor = torch.from_numpy(array if array.dtype != np.uint64 else array.astype(np.float64)).to(
                dtype
            )
        if float(np.abs(array).max()) > torch.finfo(dtype).max:
            raise _Wrong(f"{name!r} has a number that is too large for {dtype}")
        return tensor
    if kind == "f":
        raise _Wrong(
            f"{name!r} must hold whole numbers, of {dtype}"
        )  # numpy makes floats of those beyond int64
    lowest, highest = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if int(array.min()) < lowest or int(array.max()) > highest:
        raise _Wrong(f"{name!r} has a number that {dtype} does not hold")
    return torch.from_numpy(array if array.dtype != np.uint64 else array.astype(np.int64)).to(dtype)


def opened_image(content: bytes, limits: Limits) -> Image.Image:
    """A decoded PNG or JPEG file; its size is checked before it is decoded.

    Raises:
        Refused: it is none, is damaged, has too many pixels, is a strip that resizing would make huge, or takes too
            long to decode.
    """

    def too_large(what: str) -> Refused:
        return Refused(413, "pixels", f"The image {what}.")

    try:
        image = Image.open(BytesIO(content), formats=("PNG", "JPEG"))
        if (pixels := image.width * image.height) > limits.pixels:
            raise too_large(f"has {pixels:,} pixels, and the limit is {limits.pixels:,} (--max-pixels)")
        if fault := too_long(image.width, image.height, limits.shorter, limits.pixels):
            raise too_large(fault)
        if image.format != "PNG" and (scans := _scans(content)) > _MAX_JPEG_SCANS:
            raise too_large(f"is a JPEG file of {scans:,} scans; the limit is {_MAX_JPEG_SCANS}")
        image.load()
        return image
    except Image.DecompressionBombError:
        raise too_large(f"has too many pixels; the limit is {limits.pixels:,} (--max-pixels)") from None
    except UnidentifiedImageError:
        raise Refused(415, "image", "The file is no PNG or JPEG image.") from None
    except Refused:
        raise
    except Exception as error:  # decoders raise many types for damaged files
        if out_of_memory(error):
            raise
        raise Refused(400, "image", f"The image cannot be decoded: {shortened(error, 120)}.") from None


def _scans(content: bytes) -> int:
    """How often a JPEG file goes over its pixels: a few bytes each, so thousands would keep a thread busy for hours."""
    count, place = 0, 2
    while (found := _JPEG_MARKER.search(content, place)) is not None and found[0] != b"\xff\xd9":
        count += found[0] == b"\xff\xda"
        # every segment says how long it is; the data of a scan, which follow one, hold no markers
        place = found.end() + max(2, int.from_bytes(content[found.end() : found.end() + 2], "big"))
    return count


def prepared(files: Sequence[bytes], transform: Callable[[Image.Image], Any], limits: Limits) -> Tensor:
    """Image files as a batch of inputs; one image at a time is decoded, so that memory does not grow with their number.

    Raises:
        Refused: `opened_image` refuses one, the transform fails on it, or they differ in size afterwards, or are too
            large together.
    """
    batch = torch.empty(0, device="cpu")
    pixels = 0
    for index, file in enumerate(files):
        image = opened_image(file, limits)
        pixels += image.width * image.height
        if pixels > _MAX_FORM_IMAGES * limits.pixels:
            sentence = f"The images have more than {_MAX_FORM_IMAGES * limits.pixels:,} pixels together"
            raise Refused(413, "pixels", f"{sentence}; send fewer at once.")
        tensor = prepared_image(image, transform)
        del image  # before the next one is decoded
        if index == 0:
            if len(files) > 1 and tensor.numel() * len(files) > 3 * limits.pixels:
                sentence = f"{len(files)} images of {tuple(tensor.shape)} have more than {3 * limits.pixels:,} numbers"
                raise Refused(413, "pixels", f"{sentence}; send fewer at once.")
            batch = tensor.new_empty((len(files), *tensor.shape))
        if tensor.shape != batch.shape[1:]:
            sentence = (
                f"Images of one batch differ in size, {tuple(batch.shape[1:])} and {tuple(tensor.shape)}"
            )
            raise Refused(422, "image", f"{sentence}; send them one by one, or serve with --image-size.")
        batch[index] = tensor
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
