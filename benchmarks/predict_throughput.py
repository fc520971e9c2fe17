"""Throughput of ``posthoc-uq predict`` on a folder of photos, as a share of the bare model's times the number of draws.

    python benchmarks/predict_throughput.py
    python benchmarks/predict_throughput.py --workers 0 --batch 8

Photos are JPEG files of 500 x 375 pixels. The bare model runs on one batch in memory, before and after each prediction;
"share" is the time that `draws` bare passes over all images would take, divided by the time from the first batch to the
finished CSV; "share, command" by that of the whole command, with building the model, reading the posterior and drawing;
"share, CPU" compares the processor time of the whole command, its worker processes' included: a busy machine disturbs
that less, and overlap gains nothing in it. Weights are random and the posterior is INF on 8 random images: neither has
an influence on the time.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median

import numpy as np
import torch
from _cases import seconds, settle_batchnorm
from _common import Row, machine, table, write_json
from PIL import Image
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.cli import main as command_line

LIMIT = 0.8
"""Least share that a prediction should reach."""

PHOTO = (500, 375)


def make_photos(folder: Path, count: int) -> None:
    """JPEG files with the detail of photographs: noise of all scales."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        pixels = np.zeros((PHOTO[1], PHOTO[0], 3), np.float32)
        for size, weight in ((4, 60), (16, 30), (64, 20), (256, 10)):
            coarse = Image.fromarray(random.integers(0, 256, (size, size, 3)).astype(np.uint8))
            pixels += (
                (np.asarray(coarse.resize(PHOTO, Image.Resampling.BICUBIC), np.float32) - 128) * weight / 60
            )
        Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8)).save(
            folder / f"{number:05}.jpg", quality=90
        )


def prepared(folder: Path, name: str, size: int) -> tuple[nn.Module, list[str]]:
    """A network with its weights and posterior in files, and the options that name them."""
    import torchvision

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torchvision.models.get_model(name, weights=None)
        images = torch.rand(8, 3, size, size)
    settle_batchnorm(model, images)
    torch.save(model.state_dict(), folder / "weights.pt")
    posterior = uq.fit(model, [images], fisher="mc", prior_precision=1e4, progress=False)
    uq.save(posterior, folder / "posterior.h5")
    options = [
        "--model",
        f"torchvision:{name}",
        "--weights",
        str(folder / "weights.pt"),
        "--image-size",
        str(size),
    ]
    return model, options


def processor_time() -> float:
    """Seconds that this process and its finished children have computed."""
    return sum(os.times()[:4])


def predict(folder: Path, options: Sequence[str]) -> tuple[float, float, float]:
    """Seconds of the whole command, of its predictions, and of processor time."""
    said = io.StringIO()
    arguments = [
        "predict",
        str(folder / "posterior.h5"),
        str(folder / "photos"),
        *options,
        "--json",
        "--quiet",
    ]
    start = processor_time()
    with redirect_stdout(said):
        whole, _ = seconds(lambda: command_line([*arguments, "-o", str(folder / "out.csv")]))
    return whole, json.loads(said.getvalue())["seconds"], processor_time() - start


def bare(model: nn.Module, batch: Tensor, images: int) -> tuple[float, float]:
    """Seconds per image, and of processor time, of plain passes over at least that many images."""
    passes = max(1, -(-images // len(batch)))
    with torch.no_grad():
        model(batch)  # pays for allocations
        start = processor_time()
        taken, _ = seconds(lambda: [model(batch) for _ in range(passes)])
    return taken / (passes * len(batch)), (processor_time() - start) / (passes * len(batch))


def measure(
    name: str, images: int, draws: int, repeats: int, batch: int, size: int, workers: int | None
) -> list[Row]:
    """One line per repeat."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_photos(folder / "photos", images)
        model, options = prepared(folder, name, size)
        options += ["--n-samples", str(draws), "--batch-size", str(batch)]
        options += [] if workers is None else ["--workers", str(workers)]
        inputs = torch.rand(min(batch, images), 3, size, size)
        for _ in range(repeats):
            before = bare(model, inputs, images // 4)
            whole, taken, computed = predict(folder, options)
            after = bare(model, inputs, images // 4)
            plain, plain_computed = ((before[i] + after[i]) / 2 for i in (0, 1))
            rows.append(
                {
                    "model": name,
                    "images": images,
                    "draws": draws,
                    "bare, ms an image": 1e3 * plain,
                    "bare after / before": after[0] / before[0],
                    "predict, s": taken,
                    "command, s": whole,
                    "share": plain * draws * images / taken,
                    "share, command": plain * draws * images / whole,
                    "share, CPU": plain_computed * draws * images / computed,
                }
            )
            print(
                {key: value for key, value in rows[-1].items() if key.startswith(("bare", "share"))},
                flush=True,
            )
    return rows


def printed(rows: Sequence[Row]) -> str:
    """The table, and whether the median keeps to the limit."""
    shares = median(row["share"] for row in rows), median(row["share, command"] for row in rows)
    verdict = "reached" if shares[0] >= LIMIT else "missed"
    text = f"median share {shares[0]:.3f}, of the whole command {shares[1]:.3f}; {LIMIT} {verdict}"
    return f"{table(rows)}\n{text}"


def smoke() -> list[Row]:
    """A few small images; seconds."""
    return measure("resnet18", images=12, draws=3, repeats=1, batch=4, size=64, workers=0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="resnet18", help="of torchvision")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224, help="pixels of the model's input")
    parser.add_argument("--workers", type=int, help="by default the command's own choice")
    parser.add_argument("--json", type=Path, help="write the rows and the machine here")
    parser.add_argument("--smoke", action="store_true", help="twelve small images")
    given = parser.parse_args(arguments)
    if given.smoke:
        rows = smoke()
    else:
        rows = measure(
            given.model, given.images, given.draws, given.repeats, given.batch, given.size, given.workers
        )
    about = machine()
    print(printed(rows))
    print(about)
    if given.json:
        write_json(given.json, {"machine": about, "rows": rows})


if __name__ == "__main__":
    main()
