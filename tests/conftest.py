"""Settings that all tests share, and the device of those that need one."""

import signal
from itertools import combinations
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
# A shell starts what runs in the background, and nohup everything, with these ignored; tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def found_device() -> torch.device | None:
    """A device beside the CPU: CUDA, MPS, XPU, or one that a plugin has given torch."""
    for name in ("cuda", "mps", "xpu", torch._C._get_privateuse1_backend_name()):
        module = torch.backends.mps if name == "mps" else getattr(torch, name, None)
        if module is not None and module.is_available():
            return torch.device(name)
    return None


@pytest.fixture
def device() -> torch.device:
    found = found_device()
    assert found is not None, "a test that asks for the device is marked 'device'"
    return found


Combination = frozenset[tuple[str, int]]
"""Values of some parameters of a test: their names, and which objects they are."""


def _covering(items: list[pytest.Item], strength: int) -> list[pytest.Item]:
    """Few cases of a parametrized test in which every combination of `strength` values occurs."""
    found: dict[pytest.Item, set[Combination]] = {}
    for item in items:
        params: dict[str, Any] = getattr(item, "callspec").params  # noqa: B009
        values = [(name, id(value)) for name, value in params.items()]
        found[item] = {frozenset(some) for some in combinations(values, strength)}
    missing = set[Combination]().union(*found.values())
    kept = list[pytest.Item]()
    while missing:
        kept.append(max(items, key=lambda item: len(found[item] & missing)))
        missing -= found[kept[-1]]
    return kept


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    grids = dict[tuple[int, Any], list[pytest.Item]]()
    for item in items:
        only = item.get_closest_marker("only")
        if only is not None and getattr(item, "callspec").id not in only.args:  # noqa: B009
            item.add_marker(pytest.mark.study)
        mark = item.get_closest_marker("covering")
        if mark is not None and item.get_closest_marker("study") is None:
            grids.setdefault((mark.args[0], getattr(item, "obj", None)), []).append(item)
    for (strength, _), cases in grids.items():
        kept = _covering(cases, strength)
        for item in cases:
            if item not in kept:
                item.add_marker(pytest.mark.study)
    if found_device() is None:
        skipped = pytest.mark.skip(reason="needs a device beside the CPU, and torch finds none")
        for item in items:
            if item.get_closest_marker("device") is not None:
                item.add_marker(skipped)


def pytest_report_header() -> str:
    found = found_device()
    return f"device: {found or 'none beside the CPU; tests marked device are skipped'}"
