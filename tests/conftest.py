"""Settings that all tests share, and the device of those that need one."""

import pytest
import torch

torch.set_num_threads(1)


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if found_device() is None:
        skipped = pytest.mark.skip(reason="needs a device beside the CPU, and torch finds none")
        for item in items:
            if item.get_closest_marker("device") is not None:
                item.add_marker(skipped)


def pytest_report_header() -> str:
    found = found_device()
    return f"device: {found or 'none beside the CPU; tests marked device are skipped'}"
