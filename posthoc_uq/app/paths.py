"""Which files are read: regular ones, in folders and behind links; of images, in which formats and sizes."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from PIL import Image

from posthoc_uq.core.errors import PosthocUQError

IMAGE_FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats that images may have, whatever their files are called. Pillow would also read others:
PostScript, for one, which it hands to Ghostscript."""

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""How the names of image files end, in small letters."""


def irregular(path: str | os.PathLike[str]) -> str | None:
    """What stands at a path where it is no regular file and no folder, in words: such a thing may never end, or block
    for ever. None for files and folders, and where there is nothing.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def folder_files(folder: str, left_out: list[str] | None = None) -> Iterator[str]:
    """The files in a folder and in all folders in it, as paths relative to it; hidden ones are left out.

    A link to a folder elsewhere is followed. One that leads up, to a folder that it lies in, is not: every file would
    be found again below it, without end. Nor is one into the folder itself, or to where another link led: its files
    would count twice. The links that were not followed are added to `left_out`.
    """
    root = os.path.realpath(folder)
    seen = {root}
    for place, folders, files in os.walk(folder, followlinks=True):
        inside, real_place = os.path.relpath(place, folder), os.path.realpath(place)
        followed: list[str] = []
        for name in sorted(name for name in folders if not name.startswith(".")):
            path = os.path.join(place, name)
            real = os.path.realpath(path)
            leads_back = _holds(real, real_place) or _holds(real, root) or _holds(root, real)
            if real in seen or (os.path.islink(path) and leads_back):
                if left_out is not None:
                    left_out.append(os.path.normpath(os.path.join(inside, name)))
                continue
            seen.add(real)
            followed.append(name)
        folders[:] = followed
        yield from (
            os.path.normpath(os.path.join(inside, name)) for name in files if not name.startswith(".")
        )


def _holds(folder: str, path: str) -> bool:
    """Whether a path is a folder or lies in it; both are real paths."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def check_regular(path: str | os.PathLike[str], what: str) -> None:
    """Refuse what would block a reader, or feed it without end.

    Args:
        path: of something that may not be there.
        what: it should be, for the message, such as ``"The table"``.

    Raises:
        PosthocUQError: it is there, and is no file and no folder.
    """
    kind = irregular(path)
    if kind is not None:
        raise PosthocUQError(
            f"{what} '{os.fsdecode(path)}' is {kind}, not a file (<(...) of a shell makes a pipe too); write what it "
            f"gives into a file first."
        )


@contextmanager
def only_image_formats() -> Generator[None]:
    """In this block `PIL.Image.open` knows no other formats than `IMAGE_FORMATS`, for libraries that call it
    themselves.
    """
    Image.init()  # else it would look for more formats when it finds none
    known = list(Image.ID)
    Image.ID[:] = [name for name in known if name in IMAGE_FORMATS]
    try:
        yield
    finally:
        Image.ID[:] = known


UNKNOWN = 512
"""The shorter side that a transform of which nothing is known is taken to make."""
_MIN_LENGTH_LIMIT = 16  # times its shorter side, an image may be long whatever the limit


def too_long(width: int, height: int, shorter: int, limit: int) -> str:
    """What is wrong with the size of an image, in words that follow its name; nothing where it is in order. A strip of
    one pixel by thousands becomes huge where its shorter side is resized.

    Args:
        width: in pixels, as its file says.
        height: the same.
        shorter: what a transform makes of the shorter side, the longer one in proportion; 0 where it keeps the size.
        limit: pixels, width times height, that it may have afterwards; or as many as before, if these are more.
    """
    longer = shorter * max(width, height) // max(1, min(width, height))
    limit = max(limit, width * height, _MIN_LENGTH_LIMIT * shorter**2)
    if shorter * longer <= limit:
        return ""
    return (
        f"has {width:,} x {height:,} pixels; with {shorter:,} on its shorter side it would have {longer:,} on the "
        f"longer one, and the limit is {limit:,} in all. Crop it"
    )
