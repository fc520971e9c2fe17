"""Whether predictions are still those of an earlier commit: networks of the defaults' benchmark, fitted by both.

    python benchmarks/unchanged.py 68ecbc37                   all networks against the files as they are; an hour
    python benchmarks/unchanged.py 68ecbc37 --pairs iris wine
    python benchmarks/unchanged.py --smoke                    a small network against itself, for the tests

Each network (`_zoo.py`, seed 0) is fitted and predicts its test inputs in a process of each commit. Rows of a network:

* ``given prior``: over the layers that the earlier default fit covered, with the prior precision that it found and all
  labels (``fisher="exact"``), so nothing is searched and no label is drawn: what is left are curvature, contraction
  and link;
* ``earlier settings``: the fit of now over the same layers, with the hyperparameters that the earlier one found;
* ``default``: the default fits. They may cover other layers, whose numbers are beside the prior precisions, or all
  weights of a small regression by one dense block. What else it differs by more than the row before is the work of
  the search;
* ``..., calibrated``: after `uq.calibrate` with half of the test inputs; the other half is predicted.

NLL is the mean over the test inputs in nats; KL is that of the prediction now from the earlier one (of normal densities
for values): its mean, and the largest of an input.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _harness import output_file, table, write_csv
from _zoo import CLASSIFIERS, REGRESSORS, Pair, Shelf, loader, pairs_named, trained
from between_commits import ROOT, checked_out

Found = dict[str, Any]
SMOKE = Pair("mlp relu 8", "waves", False, 100)
GENERATED = (
    Pair("mlp relu 32 32", "friedman", False, 600),
    Pair("mlp tanh 32", "waves", False, 600),
    Pair("mlp gelu layer 32", "linear", False, 300),
)
"""Further networks of values, whose data need no package."""
PAIRS = (*CLASSIFIERS, *REGRESSORS, *GENERATED)
SETTINGS = ("scale", "prior_precision", "residual_weight", "noise_scale", "temperature")


def prediction_of(model: torch.nn.Module, posterior: Any, inputs: torch.Tensor) -> Found:
    """Log probabilities, or mean and variance."""
    import posthoc_uq as uq

    with torch.no_grad():
        made = [uq.wrap(model, posterior)(part) for part in inputs.split(100)]
    if isinstance(made[0], uq.RegressionPrediction):
        return {
            "mean": torch.cat([part.mean for part in made]).double(),
            "variance": torch.cat([part.variance for part in made]).double(),
        }
    logs = [part.probs.log() if part.log_probs is None else part.log_probs for part in made]
    return {"log probabilities": torch.cat(logs).double()}


def measure(pair: Pair, earlier: Mapping[str, Any] | None) -> Found:
    """The predictions of a network at this process's commit, by row.

    Args:
        pair: network and data.
        earlier: what this gave at the earlier commit; None there.
    """
    import posthoc_uq as uq

    model, split = trained(pair, 0), pair.split(0)
    values = split.classes == 1
    options = {**pair.options, **({"likelihood": "regression"} if values else {})}
    half = len(split.test.targets) // 2
    held_out = [(split.test.inputs[:half], split.test.targets[:half])]
    found: Found = {}

    def fit(**more: Any) -> Any:
        return uq.fit(model, loader(split.train), progress=False, **(options | more))

    def predict_calibrated(row: str, posterior: Any) -> None:
        found[row] = prediction_of(model, posterior, split.test.inputs)
        # the earlier function wrote into the posterior and returned something else
        calibrated = uq.calibrate(posterior, held_out, progress=False)
        posterior = calibrated if isinstance(calibrated, uq.Posterior) else posterior
        found[f"{row}, calibrated"] = prediction_of(model, posterior, split.test.inputs[half:])

    posterior = fit()
    own = {
        "settings": {name: getattr(posterior, name) for name in SETTINGS},
        "layers": list(posterior.layers),
        "blocks": list(posterior.blocks),
    }
    first = own if earlier is None else earlier
    given = {"layers": first["layers"], "prior_precision": first["settings"]["prior_precision"]}
    same = posterior if own["blocks"] == first["blocks"] else fit(**given)
    if earlier is not None:
        same = same.with_settings(**first["settings"])
    found["earlier settings"] = prediction_of(model, same, split.test.inputs)
    predict_calibrated("default", posterior)
    predict_calibrated("given prior", fit(**given, fisher="exact"))
    return {**own, "predictions": found}


def compare(row: str, pair: Pair, old: Found, new: Found) -> Found:
    """NLL at both commits, and the divergence."""
    targets = pair.split(0).test.targets
    if row.endswith("calibrated"):
        targets = targets[len(targets) // 2 :]
    before, now = old["predictions"][row], new["predictions"][row]
    if "mean" in before:
        variance, other = before["variance"], now["variance"]
        apart = (before["mean"] - now["mean"]).square()
        divergence = 0.5 * ((variance + apart) / other - 1 - (variance / other).log()).flatten()

        def nll(found: Found) -> float:
            normal = torch.distributions.Normal(found["mean"], found["variance"].sqrt())
            return -float(normal.log_prob(targets.double()).mean())
    else:
        logs, others = before["log probabilities"], now["log probabilities"]
        divergence = torch.special.xlogy(logs.exp(), (logs - others).exp()).sum(1)

        def nll(found: Found) -> float:
            return -float(found["log probabilities"].gather(1, targets.unsqueeze(1)).mean())

    line: Found = {"network": pair.name, "row": row, "NLL, earlier": nll(before), "NLL, now": nll(now)}
    line |= {"NLL, change": line["NLL, now"] - line["NLL, earlier"]}
    line |= {"KL, mean": max(0.0, float(divergence.mean())), "KL, largest": max(0.0, float(divergence.max()))}
    if row == "default":
        for name in ("prior_precision", "temperature"):
            label = name.replace("_", " ")
            line |= {f"{label}, earlier": old["settings"][name], f"{label}, now": new["settings"][name]}
        line |= {"layers, earlier": len(old["layers"]), "layers, now": len(new["layers"])}
    return line


def at_commit(source: Path, pair: Pair, folder: Path, earlier: Path | None) -> Path:
    """The file of what a process at a commit measured."""
    path = folder / f"{'now' if earlier else 'earlier'}.pt"
    command = [
        sys.executable,
        __file__,
        "--child",
        pair.name,
        str(path),
        *([str(earlier)] if earlier else []),
    ]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", metavar="OLD", nargs="?", default="HEAD", help="a commit; by default HEAD")
    parser.add_argument("--pairs", nargs="+", help="texts in the names of the networks")
    parser.add_argument("--csv", type=output_file, help="write the table to this file")
    parser.add_argument("--smoke", action="store_true", help="a small network against itself, for the tests")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.smoke:
        return smoke(options.csv)
    torch.set_num_threads(1)
    if options.child:
        name, path, *earlier = options.child
        pair = next(pair for pair in PAIRS if pair.name == name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(measure(pair, torch.load(earlier[0]) if earlier else None), path)
        return
    lines: list[Found] = []
    with tempfile.TemporaryDirectory() as place, checked_out(options.old, Path(place) / "old") as old:
        for pair in pairs_named(options.pairs, PAIRS):
            try:
                trained(pair, 0)
                first = at_commit(old, pair, Path(place), None)
                second = at_commit(ROOT, pair, Path(place), first)
            except (ImportError, OSError, subprocess.CalledProcessError) as error:
                print(f"{pair.name} is left out: {error}", file=sys.stderr, flush=True)
                continue
            before, now = torch.load(first), torch.load(second)
            fresh = [compare(row, pair, before, now) for row in before["predictions"]]
            print(table(fresh), flush=True)
            lines += fresh
            if options.csv is not None:
                write_csv(options.csv, lines, ".6g")
    print(f"\n{table(summary(lines))}")


def smoke(path: Path | None) -> None:
    """One small network, at both commits the files as they are, in this process."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Shelf.folder = Path(place)
        earlier = measure(SMOKE, None)
        now = measure(SMOKE, earlier)
    lines = [compare(row, SMOKE, earlier, now) for row in earlier["predictions"]]
    print(f"{table(lines)}\n\n{table(summary(lines))}")
    if path is not None:
        write_csv(path, lines, ".6g")


def summary(lines: Sequence[Found]) -> list[Found]:
    """Means and extremes over the networks, by row."""
    found: list[Found] = []
    for row in dict.fromkeys(line["row"] for line in lines):
        own = [line for line in lines if line["row"] == row]
        changes = [abs(line["NLL, change"]) for line in own]
        divergences = [line["KL, mean"] for line in own]
        within = sum(max(change, kl) <= 1e-4 for change, kl in zip(changes, divergences, strict=True))
        found.append(
            {
                "row": row,
                "networks": len(own),
                "within 1e-4 nats": within,
                "largest change of NLL": max(changes),
                "largest mean KL": max(divergences),
                "NLL, earlier": sum(line["NLL, earlier"] for line in own) / len(own),
                "NLL, now": sum(line["NLL, now"] for line in own) / len(own),
            }
        )
    return found


if __name__ == "__main__":
    main()
