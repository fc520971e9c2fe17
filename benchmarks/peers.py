"""Other libraries' fits, in an environment of their own: laplace-torch and curvlinops.

They are no dependencies. The environment is made once, and `fit_cost.py` then runs this script in it:

    python benchmarks/peers.py --install .venv-peers               borrows torch from this environment; 30 MB
    python benchmarks/peers.py --install .venv-peers --standalone  borrows nothing; 6 GB

``--serve`` answers one line of JSON for each line of JSON on its input. ``{"case": ..., "data": ...}`` builds
the network of a case and reads its images from a file; ``{"peer": ...}`` then fits that peer between two plain
passes and answers ``{"seconds": ..., "plain": ..., "note": ..., "error": ...}``, times in seconds. A peer that
refuses the network as it is (BatchNorm, say) gets a second chance with every parameter outside of linear and
convolution layers frozen, which is what the library's own posterior covers.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from _cases import Batches, plain_pass, prepare, seconds
from _memory import forget_peak, limit_memory, peak_memory, release
from torch import Tensor, nn

PACKAGES = ("laplace-torch==0.3", "curvlinops-for-pytorch==3.0.1")
BORROWED = ("torch", "torchvision", "timm", "numpy", "scipy")
SHOWN = ("laplace-torch", "curvlinops-for-pytorch", "asdfghjkl", "backpack-for-pytorch", "torch")
FROZEN = "other parameters frozen"
"""Note on a fit that was given linear and convolution layers alone."""
OUT_OF_MEMORY = "out of memory"
_NO_FREEZING = (
    "If some grad are switched off"  # says laplace-torch of the back ends that take no such network
)
Fit = Callable[[nn.Module, Batches], Any]


class Loader:
    """Batches with the data set that laplace-torch asks a loader for."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.dataset = range(samples(batches))

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)


def samples(batches: Batches) -> int:
    """How many samples the batches hold."""
    return sum(len(labels) for _, labels in batches)


def laplace_torch(structure: str, backend: str, mc: bool = False) -> Fit:
    """laplace-torch's posterior over all weights, by one of its back ends.

    Args:
        structure: ``"kron"`` or ``"diag"``.
        backend: the name of a class in ``laplace.curvature``.
        mc: draw one label a sample, in place of the expectation over all classes.
    """

    def fit(model: nn.Module, batches: Batches) -> Any:
        from laplace import Laplace, curvature

        posterior = Laplace(
            model,
            "classification",
            subset_of_weights="all",
            hessian_structure=structure,
            backend=getattr(curvature, backend),
            backend_kwargs={"stochastic": True} if mc else None,
        )
        posterior.fit(Loader(batches))
        return posterior

    return fit


def ekfac(model: nn.Module, batches: Batches) -> Any:
    """curvlinops' eigenvalue-corrected KFAC with drawn labels: factors, eigenvectors and corrected eigenvalues.

    Without the checks and the passes that only count samples.
    """
    from curvlinops import EKFACLinearOperator, FisherType

    operator = EKFACLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction="sum"),
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        batches,
        fisher_type=FisherType.MC,
        check_deterministic=False,
        num_per_example_loss_terms=1,
        num_data=samples(batches),
    )
    operator.compute_eigenvalue_correction()  # computes the factors and their eigenvectors first
    return operator


_BACKENDS = ("BackPackGGN", "AsdlGGN", "CurvlinopsGGN", "BackPackEF", "AsdlEF", "CurvlinopsEF")
PEERS: dict[str, Fit] = {
    f"laplace {structure} {backend}{' MC' * mc}": laplace_torch(structure, backend, mc)
    for structure in ("kron", "diag")
    for backend in _BACKENDS
    for mc in ((False, True) if backend.endswith("GGN") else (False,))
} | {"curvlinops EKFAC MC": ekfac}
"""By the back end's name; the GGN ones also with drawn labels ("MC"), as the library's own fits have them."""


def freeze_others(model: nn.Module) -> None:
    """Leave gradients to linear and convolution layers alone."""
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            module.requires_grad_(True)


def described(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "allocate memory" in text or "bad_alloc" in text:
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {text}"[:200]


class Server:
    """The case at hand, and which peers want it frozen."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._batches: Batches = []
        self._frozen: dict[str, bool] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        if "data" in request:
            self._model = None
            self._frozen = {}
            self._model, self._batches = prepare(request["case"], Path(request["data"]))
            return {"plain": seconds(lambda: plain_pass(self._model, self._batches))[0]}
        peer = request["peer"]
        errors: list[str] = []
        for frozen in (self._frozen[peer],) if peer in self._frozen else (False, True):
            release()
            try:
                times = self._timed(PEERS[peer], frozen)
            except Exception as error:
                if _NO_FREEZING not in str(error):
                    errors.append(described(error))
                if OUT_OF_MEMORY in errors:
                    break
                continue
            self._frozen[peer] = frozen
            return {**times, "note": FROZEN if frozen else None, "error": None}
        return {"error": f"; {FROZEN}: ".join(errors)}

    def _timed(self, fit: Fit, frozen: bool) -> dict[str, float]:
        assert self._model is not None
        model = copy.deepcopy(self._model)  # some back ends leave their hooks on it
        if frozen:
            freeze_others(model)
        before, _ = seconds(lambda: plain_pass(self._model, self._batches))
        own, _ = seconds(lambda: fit(model, self._batches))
        after, _ = seconds(lambda: plain_pass(self._model, self._batches))
        return {"seconds": own, "plain": (before + after) / 2}


def serve(memory: int | None, threads: int) -> None:
    """Answer requests until the input ends. Whatever the libraries print goes to the error output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    limit_memory(memory)
    torch.set_num_threads(threads)
    server = Server()
    with suppress(ImportError):  # reported by the peer that misses it
        import_peers()
    print(json.dumps({"versions": versions()}), file=answers)
    for line in sys.stdin:
        try:
            found = server.answer(json.loads(line))
        except Exception as error:
            found = {"error": described(error)}
        print(json.dumps(found), file=answers)


def child(case: str, peer: str, data: Path, frozen: bool) -> dict[str, int]:
    """Peak memory of a fresh process that makes one plain pass (peer "plain") or one fit."""
    import_peers()
    model, batches = prepare(case, data)
    if frozen:
        freeze_others(model)
    forget_peak()
    if peer == "plain":
        plain_pass(model, batches)
        return {"peak": peak_memory()}
    kept = PEERS[peer](model, batches)
    peak = peak_memory()
    del kept
    return {"peak": peak}


def import_peers() -> None:
    """Import the libraries, so that they weigh on every process alike."""
    import curvlinops  # noqa: F401
    import laplace.curvature  # noqa: F401


def versions() -> dict[str, str]:
    """Installed versions of what is compared."""
    found: dict[str, str] = {}
    for name in SHOWN:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def python_of(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(folder: Path, standalone: bool) -> None:
    """Make the peers' environment; by default with torch and its companions borrowed from this one.

    Where the peers do not work with these, everything is installed anew.
    """
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        raise SystemExit(f"'{folder}' exists and is no virtual environment.")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    python = str(python_of(folder))
    if not standalone:
        ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = Path(subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
        own = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in own))
    try:
        packages = [*PACKAGES, *(BORROWED if standalone else ())]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        subprocess.run([python, __file__, "--check"], check=True)
    except subprocess.CalledProcessError:
        if standalone:
            raise
        print("The peers do not work with this environment's packages; installing all of them anew.")
        install(folder, standalone=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--install", type=Path, metavar="FOLDER", help="make the peers' environment")
    action.add_argument("--serve", action="store_true", help="answer fit_cost.py; in the peers' environment")
    action.add_argument("--check", action="store_true", help="import the peers and print their versions")
    action.add_argument("--child", nargs=3, metavar=("CASE", "PEER", "DATA"), help=argparse.SUPPRESS)
    parser.add_argument("--standalone", action="store_true", help="borrow no packages of this environment")
    parser.add_argument("--frozen", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help="bytes that this process may allocate")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.install:
        install(options.install, options.standalone)
    elif options.serve:
        serve(options.memory, options.threads)
    elif options.check:
        import_peers()
        print(", ".join(f"{name} {found}" for name, found in versions().items()))
    else:
        limit_memory(options.memory)
        torch.set_num_threads(options.threads)
        case, peer, data = options.child
        print("\n" + json.dumps(child(case, peer, Path(data), options.frozen)))


if __name__ == "__main__":
    main()
