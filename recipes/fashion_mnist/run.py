"""FashionMNIST against MNIST digits: one trained CNN, every posterior, every head, in one table.

    python recipes/fashion_mnist/run.py --seeds 0 1 2       # as the README shows it; some hours on two cores
    python recipes/fashion_mnist/run.py --smoke             # a minute, for checking that it runs

Writes ``results-*.json`` and ``table.md`` into a folder of these settings in the output folder; networks and posteriors
are kept there too, and a second run goes on from them.
"""

from __future__ import annotations

import argparse
import json
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import methods
import torch
from data import DEBIAN, Data, Labelled, load
from network import cnn, small_cnn, trained, trained_on
from table import write_table
from variational import TRAINED

from posthoc_uq.evaluation.measurements import foreignness
from posthoc_uq.evaluation.metrics import joint_tail, ood_auroc, risk_coverage

OUTPUT = Path(__file__).parents[1] / "output" / "fashion_mnist"
BOTH = {"entropy", "novelty"}
"""Scores that are also judged together: an input counts by the smaller of its tail probabilities on held-out images."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=DEBIAN, help="torchvision's folder, or one with .gz files"
    )
    parser.add_argument(
        "--download", action="store_true", help="let torchvision fetch FashionMNIST to --data"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="networks, posteriors, results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one network each")
    parser.add_argument(
        "--members",
        type=int,
        default=5,
        help="of the deep ensemble: the seeds from this one on; 0 leaves it out",
    )
    parser.add_argument(
        "--rows", nargs="+", help="patterns of the rows to measure, such as 'INF*'; default: all"
    )
    parser.add_argument(
        "--posteriors", nargs="+", default=list(methods.POSTERIORS), choices=methods.POSTERIORS
    )
    parser.add_argument(
        "--variational-epochs",
        type=int,
        default=5,
        help="of the posteriors that are trained, and of the control; 0 leaves them out",
    )
    parser.add_argument("--epochs", type=int, default=15, help="of the networks")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument(
        "--tuned-on", type=int, default=2000, help="held-out images for every `uq.tune` and the tails"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="few images, a smaller network, one epoch, one posterior"
    )
    return parser.parse_args()


def main() -> None:
    """Every seed, then the table of all results in the output folder."""
    options = arguments()
    data = load(options.data, options.output, download=options.download)
    if options.smoke:
        data = smaller(data)
        options.seeds, options.members, options.epochs, options.tuned_on = [0], 2, 1, 40
        options.posteriors, options.variational_epochs = options.posteriors[-1:], 1
    # what belongs to other settings is never mixed in
    folder = options.output / f"{len(data.train.labels)}-{options.epochs}-{options.learning_rate:g}"
    paths = {seed: folder / f"results-{options.tuned_on}-seed{seed}.json" for seed in options.seeds}
    for seed, path in paths.items():
        one_seed(data, seed, folder, path, options)
        print(f"seed {seed} is done", flush=True)
    results = [json.loads(path.read_text()) for path in paths.values()]
    print(write_table(results, folder / "table.md", options.smoke))


def smaller(data: Data) -> Data:
    """A small part of everything, for the smoke mode."""

    def cut(part: Labelled, size: int) -> Labelled:
        return Labelled(part.images[:size], part.labels[:size])

    return Data(cut(data.train, 140), cut(data.validation, 40), cut(data.test, 40), data.digits[:40])


def one_seed(data: Data, seed: int, folder: Path, path: Path, options: argparse.Namespace) -> None:
    """Measure what is not yet in the file of results, which has every row as soon as it is there."""
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    held_out = Labelled(
        data.validation.images[: options.tuned_on], data.validation.labels[: options.tuned_on]
    )
    plain = methods.plain(network_of(data, seed, folder, options))
    for name, make in rows_of(data, seed, folder, held_out, options).items():
        if name not in results:
            results[name] = measured(make(), data, held_out, plain)
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(f"seed {seed}, {name}: {shown(results[name])}", flush=True)


def network_of(data: Data, seed: int, folder: Path, options: argparse.Namespace) -> torch.nn.Sequential:
    """The network of a seed, trained or kept."""
    build = small_cnn if options.smoke else cnn
    return trained(data.train, seed, folder, options.epochs, options.learning_rate, build)


def rows_of(
    data: Data, seed: int, folder: Path, held_out: Labelled, options: argparse.Namespace
) -> methods.Rows:
    """All that is asked for, by name, in the order in which it is measured."""

    def control() -> torch.nn.Module:
        path = folder / f"trained-on-{epochs}-seed{seed}.pt"
        return trained_on(model, data.train, path, seed, epochs)

    model, epochs = network_of(data, seed, folder, options), options.variational_epochs
    rows: methods.Rows = {
        "plain": lambda: methods.plain(model),
        "temperature scaling": lambda: methods.temperature_scaling(model, held_out),
    }
    for name in options.posteriors:
        rows |= methods.posterior_rows(model, data, folder, name, held_out, seed)
    if epochs:
        rows |= methods.function_space_rows(model, data, folder, held_out, seed, epochs)
        for name in TRAINED:
            rows |= methods.trained_rows(model, data, folder, name, held_out, seed, epochs)
        rows |= {
            methods.CONTROL: lambda: methods.plain(control()),
            f"{methods.CONTROL}, temperature scaling": lambda: methods.temperature_scaling(
                control(), held_out
            ),
        }
    if options.members:
        numbers = range(seed, seed + options.members)
        rows[f"deep ensemble of {options.members}"] = lambda: methods.deep_ensemble(
            [network_of(data, i, folder, options) for i in numbers]
        )
    asked = options.rows or list(rows)
    return {name: make for name, make in rows.items() if any(fnmatch(name, pattern) for pattern in asked)}


@torch.no_grad()
def measured(method: methods.Method, data: Data, held_out: Labelled, plain: methods.Method) -> dict[str, Any]:
    """Quality on the test images, AUROC against the digits by every score and by entropy and novelty together, cost and
    size.
    """
    test, digits = method.predict(data.test.images), method.predict(data.digits)
    found: dict[str, Any] = test.quality(data.test.labels, bins=15)
    found["AUROC"] = {score: values["AUROC"] for score, values in foreignness(test, digits).items()}
    inside, outside = test.scores(), digits.scores()
    if inside.keys() >= BOTH:
        known = method.predict(held_out.images).scores()
        familiar = {name: known[name] for name in BOTH}
        tails = [joint_tail(familiar, {name: scores[name] for name in BOTH}) for scores in (inside, outside)]
        found["AUROC"]["both"] = ood_auroc(*tails)
    wrong = (test.predicted() != data.test.labels).double()
    found["AURC"] = risk_coverage(inside["entropy"], wrong).area
    found["time"] = relative_time(method, plain, data.test.images[:200])
    return found | {"bytes": method.size, "settings": method.settings}


def relative_time(
    method: methods.Method, plain: methods.Method, images: torch.Tensor, repeats: int = 3
) -> float:
    """Time per image over that of the plain network: the median of interleaved runs."""
    ratios: list[float] = []
    for _ in range(repeats):
        images = images.clone()  # what was predicted before is not kept for it
        start = time.perf_counter()
        plain.predict(images)
        middle = time.perf_counter()
        method.predict(images)
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return sorted(ratios)[repeats // 2]


def shown(result: dict[str, Any]) -> str:
    """A line for the terminal."""
    scores = ", ".join(f"{name} {value:.3f}" for name, value in result["AUROC"].items())
    return (
        f"accuracy {result['accuracy']:.4f}, NLL {result['NLL']:.4f}, ECE {result['ECE']:.4f}, AUROC: {scores}, "
        f"time {result['time']:.1f}"
    )


if __name__ == "__main__":
    main()
