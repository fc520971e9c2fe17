"""What a device can hold, how numbers are read from it at once, and how much memory temporaries may take.

Every tensor that the library makes is put on a named device: random numbers and small tables on the CPU, all others on
the device of the tensor that they belong to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")

_WITHOUT_DOUBLE = ("mps",)


def has_double(device: torch.device) -> bool:
    """Whether the device has float64."""
    return device.type not in _WITHOUT_DOUBLE


def widest_dtype(device: torch.device) -> torch.dtype:
    """The floating-point type of a device with the highest precision."""
    return torch.float64 if has_double(device) else torch.float32


def as_double(tensor: Tensor) -> Tensor:
    """The tensor in float64, on the CPU where its device has none."""
    if tensor.dtype == torch.float64:
        return tensor
    return (tensor if has_double(tensor.device) else tensor.cpu()).double()


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 if it is of half precision, itself otherwise.

    Raises:
        PosthocUQError: the numbers are no real floating-point ones.
    """
    if not tensor.is_floating_point():
        raise PosthocUQError(
            f"Expected floating-point numbers, got {tensor.dtype}: convert them as for the training, pictures by "
            f"x.float() / 255, say."
        )
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def host_double(value: Any) -> Tensor:
    """A number, a list of numbers or a tensor of any device, in float64 on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu().double()
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; on the CPU if it is float64 and the device has no float64."""
    if tensor.dtype == torch.float64 and not has_double(device):
        return tensor.cpu()
    return tensor.to(device)


def on_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the CPU. Those of one device come in one copy, so that the host waits for it once."""
    copies = list(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            by_device.setdefault(tensor.device, []).append(index)
    for indices in by_device.values():
        if any(tensors[index].requires_grad for index in indices):  # a copy that keeps the graph
            copies = [
                tensor.cpu() if index in indices else copies[index] for index, tensor in enumerate(tensors)
            ]
            continue
        flat = [tensors[index].contiguous().reshape(-1).view(torch.uint8) for index in indices]
        parts = torch.cat(flat).cpu().split([len(part) for part in flat])
        for index, part in zip(indices, parts, strict=True):  # cloned, so that memory is aligned for the type
            original = tensors[index]
            copies[index] = part.clone().view(original.dtype).reshape(original.shape)
    return copies


def to_device(tensors: Iterable[Tensor], device: torch.device | str) -> list[Tensor]:
    """The tensors on a device; those that come to the CPU come in one copy."""
    if torch.device(device).type == "cpu":
        return on_host(*tensors)
    return [tensor.to(device) for tensor in tensors]


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; a GPU gets it without a wait."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # a transfer from pageable memory makes the host wait
    # elsewhere the memory may be written again before it was read
    return tensor.to(device, non_blocking=device.type == "cuda")


def usable_device(name: torch.device | str, shown: str, way_out: str) -> torch.device:
    """A device on which tensors can be made.

    Args:
        name: of the device, or the device.
        shown: what the user wrote, for the error.
        way_out: what else to do, for the error.

    Raises:
        PosthocUQError: there is no such device.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise PosthocUQError(
            f"{shown} is not there: torch knows none of this name; use cpu, cuda or cuda:1."
        ) from None
    if device.type == "meta":
        raise PosthocUQError(f"{shown} is no place for numbers: tensors there have a shape alone; {way_out}.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        count = torch.cuda.device_count() if device.type == "cuda" and torch.cuda.is_available() else 0
        if not count:  # torch's own text gives advice on drivers, or lists all that it was built for
            reason = f"torch finds no {device.type} device that it can use"
        elif (device.index or 0) >= count:
            reason = f"torch finds {count} GPU{'' if count == 1 else 's'}, numbered from 0"
        else:
            reason = str(error).strip().splitlines()[0].rstrip(".")
        raise PosthocUQError(f"{shown} is not there: {reason}; {way_out}.") from None
    return device


class _FullPrecision:
    """How many computations ask for full precision at this moment, and what gives the user's settings back."""

    def __init__(self) -> None:
        self.lock, self.depth = threading.Lock(), 0
        self.restore: Callable[[], None] = lambda: None


_FULL_PRECISION = _FullPrecision()


def _without_tf32() -> Callable[[], None]:
    """Turn TF32 off, and return what turns it back.

    Newer versions of torch have a setting for each kind of operation beside the older ones for all, refuse to read the
    older ones where the user's settings have no such form, and change several of the newer by one of the older.
    """
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    given = list[tuple[Any, Any]]()
    for kind in (*matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None)):
        value = getattr(kind, "fp32_precision", None)
        if value is not None:
            given.append((kind, value))
    try:
        products, convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:
        older = None
    else:
        older = products, convolutions
        cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
    for kind, _ in given:
        if older is None or kind.fp32_precision not in ("ieee", "none"):
            kind.fp32_precision = "ieee"

    def restore() -> None:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            cudnn.allow_tf32 = older[1]
        for kind, value in given:
            kind.fp32_precision = "none"  # it goes with the setting for all kinds
            if kind.fp32_precision != value:
                kind.fp32_precision = value

    return restore


def _host_is_precise() -> bool:
    """Whether products of float32 on the CPU have all digits by the user's settings."""
    own = getattr(torch.backends.mkldnn, "matmul", None)
    try:
        return getattr(own, "fp32_precision", "none") in ("ieee", "none") and (
            torch.get_float32_matmul_precision() == "highest"
        )
    except RuntimeError:  # settings that have no older form
        return False


@contextmanager
def full_precision(device: torch.device | None = None) -> Generator[None]:
    """Convolutions and products of float32 with all of its digits, on GPUs that would round their factors to 10 bits
    (TF32, torch's default for convolutions).

    A gradient's part along a direction of little curvature is small, and its variance there large: rounding of one part
    in a thousand leaks into it from the others, and moved linearised variances of a small network by 4 %.

    Args:
        device: the only one that computes meanwhile; on a CPU there is mostly nothing to set, which takes time.
    """
    asked = _FULL_PRECISION
    with asked.lock:
        needless = asked.depth == 0 and device is not None and device.type == "cpu" and _host_is_precise()
    if needless:
        yield
        return
    with asked.lock:
        if asked.depth == 0:
            asked.restore = _without_tf32()
        asked.depth += 1
    try:
        yield
    finally:
        with asked.lock:
            asked.depth -= 1
            if asked.depth == 0:
                asked.restore()


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """A context without autocast on a type of device; none where there is no autocast, since a tracer makes a graph of
    its own of each.
    """
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def program_constant(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """A function that makes real numbers also under a tracer, which takes them as constants: its modes are those of its
    thread.
    """

    @wraps(make)
    def made(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        if not torch.compiler.is_compiling():
            return make(*args, **kwargs)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(make, *args, **kwargs).result()

    return made


class DeferredChecks:
    """Values of a batch that the host must see. They are gathered on the device and read together when the batch is
    done, since every read makes the host wait for the device.
    """

    def __init__(self) -> None:
        self._wanted: list[tuple[Tensor, Callable[[Tensor], None]]] = []

    def add(self, value: Tensor, use: Callable[[Tensor], None]) -> None:
        """Call `use` with the value on the CPU at the next `run`; it may raise an error."""
        self._wanted.append((value.detach(), use))

    def run(self) -> None:
        """Read all values, and call their functions in the order in which they were added."""
        wanted, self._wanted = self._wanted, []
        for value, (_, use) in zip(on_host(*(value for value, _ in wanted)), wanted, strict=True):
            use(value)


TEMPORARY_BYTES = 256 * 2**20
"""What one temporary may take by default. Larger ones are not faster. The order of sums, and so their rounding, goes by
this number, so it does not depend on the memory that happens to be free."""

_CPU_TEMPORARY_BYTES = 32 * 2**20


def temporary_bytes(device: torch.device) -> int:
    """What one temporary of a prediction may take by default: on a CPU, where few calls cost little more than many
    numbers, less than `TEMPORARY_BYTES`.
    """
    return _CPU_TEMPORARY_BYTES if device.type == "cpu" else TEMPORARY_BYTES


KEPT_BYTES = 2**30
"""What may be computed again, and is kept for its next use, may take."""
