"""What the demo prints: short lines and tables with aligned columns; and the number of threads it uses."""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from posthoc_uq.core.tables import text_table


def say(text: str = "") -> None:
    """Print one line at once, also into a pipe."""
    print(text, flush=True)


@contextmanager
def step(text: str) -> Generator[None, None, None]:
    """Print ``text`` before the block, and the seconds it took after."""
    print(f"{text} ...", end=" ", flush=True)
    start = time.perf_counter()
    yield
    print(f"{time.perf_counter() - start:.1f} s", flush=True)


@contextmanager
def one_thread() -> Generator[None, None, None]:
    """Compute on one core: small networks lose time by sharing work between threads, far more so on a busy machine.
    It also makes the demo print the same numbers on any number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def table(header: Sequence[str], rows: Sequence[Sequence[str | float]], digits: int = 3) -> str:
    """Rows under a header; numbers to the right with ``digits`` decimals, text to the left."""
    return text_table(header, rows, digits=digits, indent="  ")
