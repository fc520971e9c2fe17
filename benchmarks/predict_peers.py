"""Time and agreement of predictions against other libraries', in one interleaved run.

A LeNet and an MLP are trained on handwritten digits at 28 px and handed, with the data, to the process of the peers'
environment. Every prediction is timed between plain forwards of the same network and batch in its own process; each
repeat goes once through ours and theirs, and the medians of the ratios are printed. "per draw" divides by the draws
of the weights. laplace-torch's back end is its default where none is named.

    python benchmarks/peers.py --install .venv-peers             once
    OMP_NUM_THREADS=1 python benchmarks/predict_peers.py         minutes
    python benchmarks/predict_peers.py --smoke                   LeNet, ours alone; seconds

Agreement is of the outputs' variances for held-out inputs, as ours over theirs:

* our linearised head on ``method="kfac"`` against laplace-torch's GLM predictive, at the same prior precision and both
  with the exact Fisher, scaled to the sum over the data. laplace-torch factors weights and biases apart, ours factors
  them together with the bias as one more column; the network without biases has no such difference.
* our moments head on a diagonal posterior against fastbnns, which is given the very variances. They differ in LeNet's
  max pooling: maxima of independent cells here, one unscented transform of all cells of a window together there.
  "ours, sampled" and "theirs, sampled" are medians of the ratio to the variance over drawn weights.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _cases import digits
from _harness import machine, output_file, single_threaded, table, write_json
from _peer_client import PeerWorker
from fit_cost import PEERS_FOLDER, peers_worker
from peers import BATCH, DRAWS, NETWORKS, Trained, against_plain, described, write_trained
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.heads.moments import MomentsPredictor
from posthoc_uq.posteriors.posterior import Posterior

Row = dict[str, Any]
TRAINING, HELD_OUT = 1437, 64
PRIOR = 100.0
PRIORS = (1.0, PRIOR)
"""Prior precisions at which variances are compared; times are taken at `PRIOR`."""
LIMIT = 600.0
"""Seconds that a peer may take to answer; its first answer includes its fit."""
SAMPLED = 400
"""Draws of the weights that the moments heads are compared with."""


class Ours(NamedTuple):
    """One of our predictions."""

    head: str
    method: str
    layers: str = "all"
    options: dict[str, Any] = {}  # noqa: RUF012 (never written to)


OURS: dict[str, Ours] = {
    "linearized, kfac": Ours("linearized", "kfac"),
    "linearized, inf": Ours("linearized", "inf"),
    "linearized, kfac, last layer": Ours("linearized", "kfac", "last"),
    "sampling": Ours("sampling", "kfac", options={"n_samples": DRAWS}),
    "moments, kfac": Ours("moments", "kfac"),
    "moments, diag": Ours("moments", "diag"),
    "moments, diag, outputs only": Ours("moments", "diag"),
    "moments, diag, argmax": Ours("moments", "diag", options={"max_pool": "argmax"}),
}
"""Name in the table."""
DRAWING = {"sampling", "laplace NN", "laplace NN, last layer"}
ENTRIES: dict[str, tuple[list[str], list[str]]] = {
    "lenet": (
        list(OURS),
        [
            "laplace GLM",
            "laplace GLM, BackPackGGN",
            "laplace GLM, AsdlGGN",
            "laplace GLM, last layer",
            "laplace NN",
            "laplace NN, last layer",
            "fastbnns",
        ],
    ),
    "mlp": (["moments, diag", "moments, diag, outputs only"], ["fastbnns"]),
}
"""What is timed for a network: ours and theirs."""
AGREEMENTS = (
    ("lenet", "linearized, kfac", "laplace GLM"),
    ("lenet", "linearized, kfac", "laplace GLM, BackPackGGN"),
    ("lenet", "linearized, kfac", "laplace GLM, AsdlGGN"),
    ("lenet", "linearized, kfac, last layer", "laplace GLM, last layer"),
    ("lenet, no biases", "linearized, kfac", "laplace GLM"),
    ("lenet, no biases", "linearized, kfac", "laplace GLM, BackPackGGN"),
    ("lenet, no biases", "linearized, kfac", "laplace GLM, AsdlGGN"),
    ("lenet, no biases", "linearized, kfac, last layer", "laplace GLM, last layer"),
    ("mlp", "linearized, kfac", "laplace GLM"),
    ("mlp", "linearized, kfac", "laplace GLM, BackPackGGN"),
    ("mlp", "moments, diag", "fastbnns"),
    ("mlp, float64", "moments, diag", "fastbnns"),
    ("lenet", "moments, diag", "fastbnns"),
    ("lenet", "moments, diag, argmax", "fastbnns"),
)
"""Network, ours and theirs."""


def labels_of(count: int) -> Tensor:
    """The digits that the first images show."""
    from sklearn.datasets import load_digits

    return torch.from_numpy(load_digits().target[:count]).long()


class Study:
    """A trained network, and our posteriors and predictors of it.

    Args:
        name: in `peers.NETWORKS`, with ", float64" to train in double precision.
        samples: that it is trained on and posteriors are fitted on.
    """

    def __init__(self, name: str, epochs: int = 10, samples: int = TRAINING) -> None:
        self.network = name.removesuffix(", float64")
        dtype = torch.float64 if name != self.network else torch.float32
        images, labels = digits(samples + HELD_OUT).to(dtype), labels_of(samples)
        self.inputs = images[samples:].clone()
        self.batches = list(zip(images[:samples].split(BATCH), labels.split(BATCH), strict=True))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = NETWORKS[self.network]().to(dtype)
        self._train(epochs)
        self._posteriors: dict[tuple[str, str], Posterior] = {}

    def _train(self, epochs: int) -> None:
        optimiser = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        for _ in range(epochs):
            for images, labels in self.batches:
                optimiser.zero_grad()
                nn.functional.cross_entropy(self.model(images), labels).backward()
                optimiser.step()
        self.model.zero_grad(set_to_none=True)
        self.model.eval()

    def posterior(self, method: str, layers: str = "all", prior: float = PRIOR) -> Posterior:
        """A fit with the exact Fisher information."""
        if (method, layers) not in self._posteriors:
            self._posteriors[method, layers] = uq.fit(
                self.model,
                self.batches,
                method=method,
                layers=layers,
                fisher="exact",
                prior_precision=PRIOR,
                progress=False,
            )
        return self._posteriors[method, layers].with_settings(prior_precision=prior)

    def predictor(self, entry: str, prior: float = PRIOR) -> Callable[[Tensor], Any]:
        """One of `OURS` as a function of a batch."""
        own = OURS[entry]
        wrapped = uq.wrap(
            self.model, self.posterior(own.method, own.layers, prior), head=own.head, **own.options
        )
        if entry.endswith("outputs only"):
            assert isinstance(wrapped, MomentsPredictor)
            return wrapped.propagate
        return wrapped

    def moments(self, entry: str, prior: float) -> tuple[Tensor, Tensor]:
        """Mean and variance of the outputs for all held-out inputs."""
        own = OURS[entry]
        wrapped: Any = uq.wrap(
            self.model, self.posterior(own.method, own.layers, prior), head=own.head, **own.options
        )
        with torch.no_grad():
            return wrapped.functional_mean(self.inputs), wrapped.functional_variance(self.inputs)

    def sampled(self, entry: str, prior: float) -> Tensor:
        """The variance of the outputs over models drawn from the entry's posterior."""
        own = OURS[entry]
        draws = self.posterior(own.method, own.layers, prior).sample(
            SAMPLED, torch.Generator().manual_seed(0)
        )
        with torch.no_grad():
            outputs = [
                torch.func.functional_call(
                    self.model, {name: drawn[i] for name, drawn in draws.items()}, self.inputs
                )
                for i in range(SAMPLED)
            ]
        return torch.stack(outputs).double().var(0).flatten()

    def write(self, path: Path, prior: float = PRIOR) -> None:
        """Hand network, data and the diagonal posterior's variances over."""
        variances = {
            name: variance.to(self.inputs.dtype)
            for name, variance in self.posterior("diag", prior=prior).variance().items()
        }
        write_trained(path, Trained(self.model, self.batches, self.inputs, variances))


def measure(
    name: str,
    study: Study,
    path: Path,
    worker: PeerWorker | None,
    sizes: Sequence[int],
    repeats: int,
    least: float,
) -> list[Row]:
    """One line per prediction and batch size: multiples of a plain forward."""
    study.write(path)
    own, theirs = ENTRIES[name]
    if worker is not None:
        worker.prepare_trained(study.network, path)
    predictors: dict[str, Callable[[Tensor], Any]] = {}
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    failed: dict[str, str] = {}
    for entry in own:
        predictors[entry] = study.predictor(entry)
        with torch.no_grad():
            for size in sizes:  # first calls pay for what is kept from then on
                predictors[entry](study.inputs[:size])

    def once(entry: str, size: int) -> None:
        if entry in predictors:
            times = against_plain(study.model, predictors[entry], study.inputs[:size], least)
        else:
            assert worker is not None
            request = {"predict": entry, "batch": size, "prior": PRIOR, "least": least}
            times = worker.predict(request, LIMIT)
        if times.get("error") is not None:
            failed[entry] = str(times["error"])
        else:
            found.setdefault((size, entry), []).append(times)

    entries = [*own, *(theirs if worker is not None else [])]
    for repeat in range(repeats):
        for size in sizes:
            for entry in entries:
                if entry not in failed:
                    once(entry, size)
        print(f"{name}: repeat {repeat + 1} of {repeats}", flush=True)
    return [
        {"network": name, "batch": size, "prediction": entry, **columns(entry, found.get((size, entry), []))}
        | ({"note": failed[entry]} if entry in failed else {})
        for size in sizes
        for entry in entries
    ]


def columns(entry: str, times: Sequence[dict[str, float]]) -> Row:
    """The median of the multiples, their range, and what a draw costs."""
    if not times:
        return {"multiple": None}
    multiples = sorted(each["seconds"] / each["plain"] for each in times)
    middle = median(multiples)
    return {
        "plain, ms": 1e3 * median(each["plain"] for each in times),
        "ms": 1e3 * median(each["seconds"] for each in times),
        "multiple": middle,
        "least": multiples[0],
        "most": multiples[-1],
        "per draw": middle / DRAWS if entry in DRAWING else None,
    }


def agreements(
    studies: Callable[[str], Study], path: Path, worker: PeerWorker, priors: Sequence[float]
) -> list[Row]:
    """One line per pair of predictions and prior precision."""
    rows: list[Row] = []
    for name, own, peer in AGREEMENTS:
        study = studies(name)
        for prior in priors:
            study.write(path, prior)
            worker.prepare_trained(study.network, path)
            line = {"network": name, "ours": own, "theirs": peer, "prior": prior}
            answer = worker.predict({"moments": peer, "prior": prior}, LIMIT)
            if answer.get("error") is not None:
                rows.append(line | {"note": answer["error"]})
                continue
            theirs = [torch.tensor(answer[key], dtype=torch.float64) for key in ("mean", "variance")]
            try:
                ours = study.moments(own, prior)
                line |= compared(ours, theirs)
                if peer == "fastbnns":
                    drawn = study.sampled(own, prior)
                    line |= {
                        f"{side}, sampled": float((found[1].double().flatten() / drawn).median())
                        for side, found in (("ours", ours), ("theirs", theirs))
                    }
                rows.append(line)
            except Exception as error:
                rows.append(line | {"note": described(error)})
            print(rows[-1], flush=True)
    return rows


def compared(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Row:
    """Agreement of all outputs' variances for all inputs, and the largest difference of means in deviations."""
    (mean, variance), (other_mean, other_variance) = (
        [t.double().flatten() for t in pair] for pair in (ours, theirs)
    )
    ratio = variance / other_variance
    logs = torch.stack([variance.log(), other_variance.log()])
    return {
        "correlation": float(torch.corrcoef(torch.stack([variance, other_variance]))[0, 1]),
        "of logarithms": float(torch.corrcoef(logs)[0, 1]),
        "median ratio": float(ratio.median()),
        "least ratio": float(ratio.min()),
        "most ratio": float(ratio.max()),
        "means, sd": float(((mean - other_mean).abs() / other_variance.sqrt()).max()),
    }


def smoke() -> list[Row]:
    """LeNet, hardly trained, ours alone; seconds."""
    with tempfile.TemporaryDirectory() as folder:
        study = Study("lenet", epochs=1, samples=128)
        return measure("lenet", study, Path(folder) / "lenet.npz", None, (8,), repeats=2, least=0.0)


def printed(rows: Sequence[Row], digits: int = 3) -> str:
    """A table with every column that some row has."""
    names = list(dict.fromkeys(key for row in rows for key in row if key != "note"))
    names += ["note"] if any("note" in row for row in rows) else []
    return table([{key: row.get(key) for key in names} for row in rows], digits)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 64], help="at most 64 inputs each")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--least", type=float, default=0.02, help="seconds of calls that one timing averages over"
    )
    parser.add_argument("--no-agreement", action="store_true", help="only times")
    parser.add_argument("--no-times", action="store_true", help="only agreement")
    parser.add_argument("--peers-folder", type=Path, default=PEERS_FOLDER, help="their environment")
    parser.add_argument("--smoke", action="store_true", help="LeNet, ours alone; seconds")
    parser.add_argument("--json", type=output_file, help="write the tables to this file")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    agreement: list[Row] = []
    with single_threaded():
        about = machine()
        if options.smoke:
            rows = smoke()
        else:
            worker = peers_worker(options.peers_folder, None)
            studies = cache(Study)
            try:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "trained.npz"
                    if worker is not None and not options.no_agreement:
                        agreement = agreements(studies, path, worker, PRIORS)
                    for name in () if options.no_times else options.networks:
                        study = studies(name)
                        rows += measure(
                            name, study, path, worker, options.batches, options.repeats, options.least
                        )
            finally:
                if worker is not None:
                    about["peers"] = worker.versions
                    worker.close()
        about["load average at the end"] = machine()["load average, 1 min"]
    if rows:
        print(f"\nTimes in multiples of a plain forward of the same batch\n{printed(rows)}")
    if agreement:
        print(f"\nVariances of the outputs, ours over theirs\n{printed(agreement, digits=6)}")
    print(about)
    if options.json:
        write_json(options.json, {"machine": about, "rows": rows, "agreement": agreement})


if __name__ == "__main__":
    main()
