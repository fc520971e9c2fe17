"""How many torch operations fits and predictions call, and how often the host reads a number: what a GPU waits for.

    python benchmarks/operations.py                   the networks of the table, on a CPU; some minutes
    python benchmarks/operations.py --cases mlp lenet
    python benchmarks/operations.py --device cuda     host reads are then those of tensors on the device alone
    python benchmarks/operations.py --smoke           a perceptron; seconds

Counts, no times: they do not depend on the machine or its load. An operation is what torch dispatches below autograd;
views, which move no numbers, are counted among them and by themselves. "float64" are the operations, no views, that
read or write a tensor of this type. "Host reads" are numbers and tensors that Python gets (`item`, `tolist`, `cpu`,
`numpy`, a tensor as a truth value), and operations whose result has a size that the host must know. On a CPU those of
tensors that would be on the host anyway count too, and copies to it do not.

A prediction is a later one of a batch with its probabilities read, through the linearised head with INF's posterior and
ten outputs. "Sweep's batch" and "search's trial" are the medians of all batches and trials of a fit by default,
"calibrate" is a call with the inputs of that fit. "Above forward" are the operations less those of a forward pass,
"over forth and back" in units of those of a forward and a backward pass.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial, wraps
from statistics import median_low
from typing import Any, NamedTuple
from unittest import mock

import torch
from _cases import WORDS, Texts, lenet, of_timm, of_torchvision, settle_batchnorm
from _harness import Row, machine, output_file, table, write_json
from between_commits import CLASSES, mlp
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import posthoc_uq as uq
from posthoc_uq.curvature.sweep import Sweep
from posthoc_uq.fitting.faithful import Score

BATCH, BATCHES = 8, 2
LENGTH = 24
READS = frozenset("item tolist cpu numpy __bool__ __float__ __int__ __index__".split())
"""Methods of a tensor by which Python gets numbers."""
SIZED = frozenset("nonzero equal _unique2 unique_dim masked_select".split())
"""Operations whose result the host must wait for."""


class Case(NamedTuple):
    """A network with random weights, and the shape of its inputs; token ids where it has one dimension of integers."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: bool = False


CASES: dict[str, Case] = {
    "mlp": Case(mlp, (784,)),
    "lenet": Case(lenet, (1, 28, 28)),
    "resnet18, 32 px": Case(lambda: of_torchvision("resnet18", num_classes=CLASSES), (3, 32, 32)),
    "mobilenet, 64 px": Case(lambda: of_torchvision("mobilenet_v3_small", num_classes=CLASSES), (3, 64, 64)),
    "vit_tiny, 64 px": Case(
        lambda: of_timm("vit_tiny_patch16_224", img_size=64, num_classes=CLASSES), (3, 64, 64)
    ),
    "distilbert": Case(partial(Texts, CLASSES), (LENGTH,), tokens=True),
}


@dataclass
class Counts:
    """What some work called."""

    operations: int = 0
    views: int = 0
    float64: int = 0
    reads: int = 0

    def since(self, before: Counts) -> Counts:
        """What came after these counts."""
        return Counts(
            *(now - then for now, then in zip(asdict(self).values(), asdict(before).values(), strict=True))
        )


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


class Operations(TorchDispatchMode):
    """Counts operations while it is entered.

    Args:
        device: where reads count; all do on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.counts, self._device = Counts(), device
        self._reads = _Reads(self)

    def __enter__(self) -> Operations:
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._reads.__exit__(*exception)

    def read(self, source: Any) -> None:
        """Count a read of a tensor, if it is on the device."""
        self.counts.reads += isinstance(source, Tensor) and source.device.type == self._device.type

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        name, counts = function.overloadpacket.__name__, self.counts
        counts.operations += 1
        if function.is_view:
            counts.views += 1
        elif any(tensor.dtype == torch.float64 for tensor in (*_tensors(args), *_tensors(found))):
            counts.float64 += 1
        masked = name == "index" and any(index.dtype == torch.bool for index in _tensors(args[1]))
        if name in SIZED or masked:
            self.read(args[0])
        elif name in ("_to_copy", "copy_") and self._device.type != "cpu":
            source = args[1] if name == "copy_" else args[0]
            if found.device.type == "cpu":
                self.read(source)
        return found


class _Reads(TorchFunctionMode):
    """Counts the reads of `Operations` that are methods of a tensor."""

    def __init__(self, whole: Operations) -> None:
        super().__init__()
        self._whole = whole

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        # on a device, copies to the host are seen where they are dispatched
        if name in READS and (name != "cpu" or self._whole._device.type == "cpu"):
            self._whole.read(args[0])
        return function(*args, **(kwargs or {}))


def counted(work: Callable[[], Any], device: torch.device) -> Counts:
    """What some work calls."""
    with Operations(device) as operations:
        work()
    return operations.counts


@contextmanager
def parts_counted(kind: type, method: str, operations: Operations) -> Iterator[list[Counts]]:
    """The counts of each call of a method, while `operations` counts."""
    found, own = list[Counts](), getattr(kind, method)

    @wraps(own)
    def noting(*args: Any, **kwargs: Any) -> Any:
        before = Counts(**asdict(operations.counts))
        try:
            return own(*args, **kwargs)
        finally:
            found.append(operations.counts.since(before))

    with mock.patch.object(kind, method, noting):
        yield found


def middle(found: Sequence[Counts]) -> Counts:
    """The one with the median of operations."""
    number = median_low([counts.operations for counts in found])
    return next(counts for counts in found if counts.operations == number)


def measure(name: str, device: torch.device | str = "cpu") -> list[Row]:
    """A line for each kind of work on a network."""
    case, device = CASES[name], torch.device(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, count = case.build().eval(), BATCH * BATCHES
        inputs = (
            torch.randint(1, WORDS, (count, *case.shape)) if case.tokens else torch.rand(count, *case.shape)
        )
        labels = torch.arange(count) % CLASSES
    if not case.tokens:
        settle_batchnorm(model, inputs)
    model, inputs = model.to(device), inputs.to(device)
    batches = list(zip(inputs.split(BATCH), labels.to(device).split(BATCH), strict=True))
    x = batches[0][0]

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def forth_and_back() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    found: dict[str, Counts] = {}
    for what, work in (("forward", forward), ("forth and back", forth_and_back)):
        work()
        found[what] = counted(work, device)
    for layers in ("last", "all"):
        with (
            Operations(device) as operations,
            parts_counted(Sweep, "add", operations) as swept,
            parts_counted(Score, "evaluate", operations) as tried,
        ):
            posterior = uq.fit(model, batches, "inf", layers=layers, progress=False)
        predictor = uq.wrap(model, posterior, "linearized")

        def predict(predictor: uq.Predictor = predictor) -> Tensor:
            return predictor(x.clone()).probs

        predict()  # prepares what is kept
        found[f"prediction, {layers}"] = counted(predict, device)
        found[f"sweep's batch, {layers}"] = middle(swept)
        found[f"search's trial, {layers}"] = middle(tried)
        found[f"fit, {layers}"] = operations.counts
        found[f"calibrate, {layers}"] = counted(
            lambda posterior=posterior: uq.calibrate(posterior, batches, progress=False), device
        )
    plain, both = found["forward"].operations, found["forth and back"].operations
    return [
        {"case": name, "what": what, **asdict(counts)}
        | {"above forward": counts.operations - plain, "over forth and back": counts.operations / both}
        for what, counts in found.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=output_file, help="write the table to this file")
    parser.add_argument("--smoke", action="store_true", help="a perceptron alone")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ["mlp"] if options.smoke else options.cases:
            rows += measure(name, options.device)
    about = machine()
    print(f"{table(rows)}\n\n{about}")
    if options.json is not None:
        write_json(options.json, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
