"""What a posterior over the last layer costs, in multiples of plain passes of the same network in the same run.

    OMP_NUM_THREADS=1 python benchmarks/last_layer_cost.py

* A prediction for one image, by every head, in multiples of a plain forward pass for it.
* Tuning on held-out images (five prior precisions, so six evaluations with the model alone), and fitting without a
  search, in multiples of a plain pass over the same images; "passes" counts how often an image went through the
  network's first layer.

Plain passes are made before and after everything that is timed, and the multiple, of processor time, is the median over
the repeats. Weights are random: they have no influence on the time.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _cases import lenet, settle_batchnorm
from _common import Row, machine, single_threaded, table, write_json
from torch import Tensor, nn

import posthoc_uq as uq

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "sampling": ("sampling", {}),
    "sampling, loop": ("sampling", {"batched": False}),
    "sampling, antithetic": ("sampling", {"antithetic": True}),
    "linearized": ("linearized", {}),
    "linearized, 32 draws": ("linearized", {"engine": "jvp"}),
    "moments": ("moments", {}),
}
"""Name in the table to head and options."""
METHODS = ("diag", "kfac", "efb", "inf")
PRECISIONS = [0.1, 1.0, 10.0, 100.0, 1000.0]


class Case:
    """A network in eval mode and images for it."""

    def __init__(self, name: str, images: int, batch: int, classes: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = _resnet(classes) if name == "resnet18" else lenet()
            shape = (3, 224, 224) if name == "resnet18" else (1, 28, 28)
            pictures = torch.rand(images, *shape)
        settle_batchnorm(self.model, pictures[:batch])
        self.name, self.first = name, next(m for m in self.model.modules() if isinstance(m, nn.Conv2d))
        with torch.no_grad():
            labels = torch.cat([self.model(part).argmax(1) for part in pictures.split(batch)])
        self.loader = list(zip(pictures.split(batch), labels.split(batch), strict=True))
        self.images = images

    def plain(self) -> None:
        """A pass over all images."""
        with torch.no_grad():
            for part, _ in self.loader:
                self.model(part)

    def fit(self, method: str = "diag") -> uq.Posterior:
        """A posterior over the last layer, without a search for its prior."""
        return uq.fit(
            self.model, self.loader, method=method, layers="last", prior_precision=100.0, progress=False
        )


def _resnet(classes: int) -> nn.Module:
    import torchvision

    return torchvision.models.resnet18(weights=None, num_classes=classes).eval()


@contextmanager
def counted(case: Case) -> Iterator[list[int]]:
    """Images that go through the network's first layer, in whatever copy of it."""
    seen = [0]
    shape, forward = case.first.weight.shape, torch.nn.functional.conv2d

    def conv2d(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if weight.shape == shape:
            seen[0] += len(input)
        return forward(input, weight, *args, **kwargs)

    torch.nn.functional.conv2d = conv2d
    try:
        yield seen
    finally:
        torch.nn.functional.conv2d = forward


def multiples(plain: Callable[[], Any], work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """The time of `work` in plain passes, which run before and after it."""
    found: list[tuple[float, float]] = []
    for _ in range(repeats):
        before, taken, after = processor(plain), processor(work), processor(plain)
        found.append(((before + after) / 2, 2 * taken / (before + after)))
    return {
        "plain, ms": 1e3 * median(unit for unit, _ in found),
        "multiple": median(multiple for _, multiple in found),
        "least": min(multiple for _, multiple in found),
    }


def processor(work: Callable[[], Any]) -> float:
    """Seconds of processor time that some work takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def predictions(case: Case, draws: int, repeats: int) -> list[Row]:
    """One line per head, for one image."""
    posterior, image = case.fit(), case.loader[0][0][:1]
    rows: list[Row] = []
    for name, (head, options) in HEADS.items():
        options = options | ({"n_samples": draws} if head == "sampling" else {})
        predictor = uq.wrap(case.model, posterior, head, **options)
        with torch.no_grad():
            predictor(image), case.model(image)  # the first calls settle the cut
            found = multiples(lambda: case.model(image), lambda p=predictor: p(image), repeats)
        rows.append({"case": case.name, "what": f"one image, {name}", **found})
        print(rows[-1], flush=True)
    return rows


def searches(case: Case, repeats: int) -> list[Row]:
    """One line per head that held-out data are predicted through."""
    posterior = case.fit()
    rows: list[Row] = []
    for head in ("sampling", "linearized", "moments"):

        def work(head: str = head) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # random weights may be better without a posterior
                uq.tune(posterior, case.loader, head=head, prior_precisions=PRECISIONS, progress=False)

        rows.append(_counted_row(case, f"tune, {head}", work, repeats))
    return rows


def fits(case: Case, repeats: int) -> list[Row]:
    """One line per method."""
    return [_counted_row(case, f"fit, {m}", lambda m=m: case.fit(m), repeats) for m in METHODS]


def _counted_row(case: Case, what: str, work: Callable[[], Any], repeats: int) -> Row:
    with counted(case) as seen:
        work()
    found = multiples(case.plain, work, repeats)
    row = {"case": case.name, "what": what, **found, "passes": seen[0] / case.images}
    print(row, flush=True)
    return row


def smoke() -> list[Row]:
    """LeNet on few images; seconds."""
    case = Case("lenet", images=64, batch=32, classes=10)
    return predictions(case, draws=4, repeats=2) + searches(case, repeats=1) + fits(case, repeats=1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, default=200, help="held-out and training images")
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--classes", type=int, default=1000, help="of the predictions for one image")
    parser.add_argument("--search-classes", type=int, default=10, help="of the searches and fits")
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7, help="for one image; a third of them for the rest")
    parser.add_argument("--json", type=Path, help="write the rows and the machine here")
    parser.add_argument("--smoke", action="store_true", help="LeNet on a few images")
    given = parser.parse_args(arguments)
    with single_threaded():
        if given.smoke:
            rows = smoke()
        else:
            few = max(1, given.repeats // 3)
            rows = predictions(Case("resnet18", 8, 8, given.classes), given.draws, given.repeats)
            case = Case("resnet18", given.images, given.batch, given.search_classes)
            rows += searches(case, few) + fits(case, few)
        about = machine()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print(table([{key: row.get(key) for key in columns} for row in rows]))
    print(about)
    if given.json:
        write_json(given.json, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
