"""What fits and predictions cost on an accelerator, in plain passes there, and how far its results are from the CPU's.

    python benchmarks/device_cost.py                  on the GPU that torch finds; about three minutes on an H100
    python benchmarks/device_cost.py --smoke --device cpu    LeNet, seconds

"fit" is a fit with a given prior precision and one drawn label a sample, in forward and backward passes over the same
data; "search" what a fit by default takes longer, in plain passes of one input. Predictions are in forward passes of
their batch. Each is the median over the repeats between plain passes, and the device is waited for at each reading
of the clock. "MiB" is the peak above what was held before; "plain MiB" that of the plain pass.

"from the CPU" is how far the device's mean and standard deviation of the outputs are from those of the same posterior
on the CPU: the largest difference over the largest value there.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from _cases import Batches, lenet, of_timm, of_torchvision, plain_pass, settle_batchnorm
from _harness import MIB, Row, interleaved, machine, output_file, seconds, table, write_json
from torch import Tensor, nn

import posthoc_uq as uq

METHODS: dict[str, dict[str, Any]] = {"diag": {"method": "diag"}, "kfac": {"method": "kfac"}, "inf": {}}
HEADS: dict[str, dict[str, Any]] = {"linearized": {}, "sampling": {"n_samples": 30}, "moments": {}}


class Case(NamedTuple):
    """A network with random weights, the shape of an input, its classes, and how many inputs there are at a time."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int
    batches: int


class Texts(nn.Module):
    """A BERT of base size from its configuration, which takes a tensor of token ids."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.bert = BertForSequenceClassification(BertConfig(num_labels=4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.bert(input_ids=ids).logits


CASES: dict[str, Case] = {
    "lenet": Case(lenet, (1, 28, 28), 10, 512, 8),
    "resnet18, 32 px": Case(lambda: of_torchvision("resnet18", num_classes=10), (3, 32, 32), 10, 256, 8),
    "resnet50, 224 px": Case(lambda: of_torchvision("resnet50"), (3, 224, 224), 1000, 64, 4),
    "vit_small, 224 px": Case(
        lambda: of_timm("vit_small_patch16_224", num_classes=10), (3, 224, 224), 10, 64, 4
    ),
    "bert_base, 128 tokens": Case(Texts, (128,), 4, 64, 4),
}


class Clock:
    """Waits for the device at each reading, and reads its memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = getattr(torch, device.type) if device.type != "cpu" else None

    def waited(self, work: Callable[[], Any]) -> Callable[[], Any]:
        def done() -> Any:
            result = work()
            if self.module is not None:
                self.module.synchronize()
            return result

        return done

    def peak(self, work: Callable[[], Any]) -> float | None:
        """MiB that some work takes at most, above what was held before; unknown on the CPU."""
        if self.module is None or not hasattr(self.module, "max_memory_allocated"):
            return None
        self.module.reset_peak_memory_stats()
        before = self.module.memory_allocated()
        self.waited(work)()
        return (self.module.max_memory_allocated() - before) / MIB


def prepared(case: Case, device: torch.device) -> tuple[nn.Module, Batches]:
    """A network on the device, and its batches on the CPU as loaders give them."""
    torch.manual_seed(0)
    model, count = case.build(), case.batch * case.batches
    if len(case.shape) == 1:
        inputs = torch.randint(1, 30_000, (count, *case.shape))
        model.eval()
    else:
        inputs = torch.rand(count, *case.shape)
        settle_batchnorm(model, inputs[:32])
    labels = torch.randint(case.classes, (count,))
    batches = list(zip(inputs.split(case.batch), labels.split(case.batch), strict=True))
    return model.to(device), batches


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, over the largest value of the other."""
    other = other.double()
    return float((one.cpu().double() - other).abs().max() / other.abs().max())


def measure(name: str, device: torch.device, repeats: int, search: bool, rows: list[Row]) -> None:
    """Add one line for each fit, and one for each head."""
    clock = Clock(device)
    model, batches = prepared(CASES[name], device)
    there = [(x.to(device), y.to(device)) for x, y in batches]
    images = there[0][0]

    def forward() -> None:
        with torch.no_grad():
            model(images)

    plain = clock.waited(lambda: plain_pass(model, there))
    for method, options in METHODS.items():

        def fit(options: dict[str, Any] = options) -> Any:
            return uq.fit(model, batches, prior_precision=1.0, progress=False, **{"fisher": "mc"} | options)

        try:
            found = interleaved(plain, clock.waited(fit), repeats, least=0.05)
            rows.append(
                {"case": name, "what": f"fit, {method}", **found}
                | {"MiB": clock.peak(fit), "plain MiB": clock.peak(plain)}
            )
        except (uq.PosthocUQError, RuntimeError) as error:
            rows.append({"case": name, "what": f"fit, {method}", "note": f"{error}"[:200]})
        print(rows[-1], flush=True)
    posterior = fit()
    if search:
        few = [(x[:64], y[:64]) for x, y in batches[:1]]
        unit, _ = seconds(
            clock.waited(lambda: plain_pass(model, [(x.to(device), y.to(device)) for x, y in few]))
        )
        given, _ = seconds(clock.waited(lambda: uq.fit(model, few, prior_precision=1.0, progress=False)))
        default, _ = seconds(clock.waited(lambda: uq.fit(model, few, progress=False)))
        passes = (default - given) / (unit / len(few[0][0]))
        rows.append(
            {"case": name, "what": "search, 64 inputs", "multiple": passes, "seconds": default - given}
        )
        print(rows[-1], flush=True)
    host = copy.deepcopy(model).cpu()
    plain_forward = clock.waited(forward)
    for head, options in HEADS.items():
        try:
            predictor = uq.wrap(model, posterior, head, **options)
            plain_forward()
            unit, _ = seconds(plain_forward)
            first, _ = seconds(clock.waited(lambda p=predictor: p(images)))
            found = interleaved(
                plain_forward, clock.waited(lambda p=predictor: p(images)), repeats, least=0.05
            )
            row = {"case": name, "what": head, **found, "first call": first / unit}
            row |= {"MiB": clock.peak(lambda p=predictor: p(images)), "plain MiB": clock.peak(plain_forward)}
            moments = []
            for network in (model, host):
                one = uq.wrap(
                    network, posterior, head, **options, **({"seed": 1} if head == "sampling" else {})
                )
                place = next(network.parameters()).device
                moments.append(one(images[:8].to(place)))
            row["mean from the CPU"] = apart(moments[0].outputs_mean, moments[1].outputs_mean)
            deviations = [moment.logits_variance.double().sqrt() for moment in moments]
            row["deviation from the CPU"] = apart(*deviations)
            rows.append(row)
        except (uq.PosthocUQError, RuntimeError) as error:
            rows.append({"case": name, "what": head, "note": f"{type(error).__name__}: {error}"[:200]})
        print(rows[-1], flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--tf32", choices=("torch", "off"), default="torch", help="rounding of float32 products"
    )
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--smoke", action="store_true", help="LeNet, one repeat")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.cases, options.repeats = ["lenet"], 1
    if options.tf32 == "off":
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(options.device)
    rows: list[Row] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in options.cases:
            try:
                measure(name, device, options.repeats, not options.smoke, rows)
            except Exception as error:  # the others are measured all the same
                rows.append({"case": name, "what": "all", "note": f"{type(error).__name__}: {error}"[:300]})
                print(rows[-1], flush=True)
    print(table(rows))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    print(machine() | {"device": where})
    if options.json is not None:
        write_json(options.json, {"machine": machine() | {"device": where}, "rows": rows})


if __name__ == "__main__":
    main()
