"""Other libraries' fits and predictions, in an environment of their own: laplace-torch, curvlinops, fastbnns.

They are no dependencies. The environment is made once, and `fit_cost.py` and `predict_peers.py` then run this
script in it (`defaults.py` is run by its interpreter):

    python benchmarks/peers.py --install .venv-peers               borrows torch from this environment; 30 MB
    python benchmarks/peers.py --install .venv-peers --standalone  borrows nothing; 6 GB

``--serve`` answers one line of JSON for each line of JSON on its input. ``{"case": ..., "data": ...}`` builds
the network of a case and reads its images from a file; ``{"peer": ...}`` then fits that peer between two plain
passes and answers ``{"seconds": ..., "plain": ..., "note": ..., "error": ...}``, times in seconds. A peer that
refuses the network as it is (BatchNorm, say) gets a second chance with every parameter outside of linear and
convolution layers frozen, which is what the library's own posterior covers.

``{"network": ..., "trained": ...}`` reads a trained network and its data from a file, ``{"predict": ...}`` then times
that peer's prediction between plain forwards, and ``{"moments": ...}`` gives its mean and variance of the outputs.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _cases import Batches, lenet, plain_pass, prepare
from _harness import limit_memory, release, seconds
from torch import Tensor, nn

PACKAGES = (
    "laplace-torch==0.3",
    "curvlinops-for-pytorch==3.0.1",
    "fastbnns==0.4.3",
    "pytorch-ood==0.4.0",  # defaults.py: scores of foreignness
    "transformers>=5",  # defaults.py: a BERT
)
BORROWED = ("torch", "torchvision", "timm", "numpy", "scipy")
SHOWN = ("laplace-torch", "curvlinops-for-pytorch", "asdfghjkl", "backpack-for-pytorch", "fastbnns", "torch")
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


def laplace_torch(structure: str, backend: str, mc: bool = False, subset: str = "all") -> Fit:
    """laplace-torch's posterior, by one of its back ends.

    Args:
        structure: ``"kron"`` or ``"diag"``.
        backend: the name of a class in ``laplace.curvature``.
        mc: draw one label a sample, in place of the expectation over all classes.
        subset: of the weights: ``"all"`` or ``"last_layer"``.
    """

    def fit(model: nn.Module, batches: Batches) -> Any:
        from laplace import Laplace, curvature

        posterior = Laplace(
            model,
            "classification",
            subset_of_weights=subset,
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


DRAWS = 30
"""Of the weights, for every prediction by sampling."""
BATCH = 64
"""Samples in a batch of the data that a posterior is fitted on."""


def mlp() -> nn.Module:
    """Two hidden layers of 128 ReLU units for 28 x 28 grey images."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def lenet_without_biases() -> nn.Module:
    """LeNet whose layers have a weight alone, so that no two libraries can differ in how they treat the bias."""
    model = lenet()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.register_parameter("bias", None)
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lenet,
    "lenet, no biases": lenet_without_biases,
    "mlp": mlp,
}
"""Those that `predict_peers.py` trains."""


class Trained(NamedTuple):
    """A trained network and its data, as the library's process hands them over to the peers'.

    Attributes:
        batches: that posteriors are fitted on.
        inputs: held out, to predict for.
        variances: of a diagonal posterior, by parameter.
    """

    model: nn.Module
    batches: Batches
    inputs: Tensor
    variances: Mapping[str, Tensor]


def write_trained(path: Path, trained: Trained) -> None:
    """A network's weights and data as a file that both processes read."""
    named = {f"weight {name}": weight.numpy() for name, weight in trained.model.state_dict().items()}
    named |= {f"variance {name}": variance.numpy() for name, variance in trained.variances.items()}
    images, labels = (torch.cat(parts).numpy() for parts in zip(*trained.batches, strict=True))
    np.savez(path, images=images, labels=labels, inputs=trained.inputs.numpy(), **named)


def read_trained(network: str, path: Path) -> Trained:
    """What `write_trained` wrote."""
    with np.load(path) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    images, labels, inputs = (found.pop(name) for name in ("images", "labels", "inputs"))
    weights, variances = (
        {name.removeprefix(kind): array for name, array in found.items() if name.startswith(kind)}
        for kind in ("weight ", "variance ")
    )
    model = NETWORKS[network]().to(inputs.dtype).eval()
    model.load_state_dict(weights)
    return Trained(model, list(zip(images.split(BATCH), labels.split(BATCH), strict=True)), inputs, variances)


Moments = tuple[Tensor, Tensor]


class PeerPredictor(NamedTuple):
    """A peer's prediction, and the mean and variance of the outputs that it is made of, where it has these."""

    predict: Callable[[Tensor], Any]
    moments: Callable[[Tensor], Moments] | None = None


def laplace_predictor(kind: str, backend: str, subset: str) -> Callable[[Trained, float], PeerPredictor]:
    """laplace-torch's prediction from a Kronecker-factored posterior.

    Args:
        kind: ``"glm"``, linearised with the probit link, or ``"nn"``, by drawing weights.
        backend: the name of a class in ``laplace.curvature``.
        subset: of the weights: ``"all"`` or ``"last_layer"``.
    """

    def make(trained: Trained, prior: float) -> PeerPredictor:
        posterior = laplace_torch("kron", backend, subset=subset)(
            copy.deepcopy(trained.model), trained.batches
        )
        posterior.prior_precision = prior
        if kind == "nn":
            return PeerPredictor(lambda x: posterior(x, pred_type="nn", link_approx="mc", n_samples=DRAWS))
        last = subset == "last_layer"

        def moments(x: Tensor) -> Moments:
            with torch.enable_grad():
                pull = posterior.backend.last_layer_jacobians if last else posterior.backend.jacobians
                jacobians, mean = pull(x)
            return mean, posterior.functional_variance(jacobians).diagonal(dim1=1, dim2=2)

        return PeerPredictor(lambda x: posterior(x, pred_type="glm", link_approx="probit"), moments)

    return make


def fastbnns_predictor(trained: Trained, prior: float) -> PeerPredictor:
    """fastbnns' moments of the outputs by the unscented transform, with the variances that were handed over.

    The transform's constants are its defaults, given in the data's precision: its own are rounded to float32.
    """
    from fastbnns.bnn.base import BNN
    from fastbnns.bnn.inference import UnscentedTransform
    from fastbnns.bnn.types import MuVar

    kind = trained.inputs.dtype
    scale, weights = torch.tensor(3.0, dtype=kind).sqrt(), torch.tensor([4.0, 1.0, 1.0], dtype=kind) / 6
    network = BNN(
        trained.model,
        wrapper_kwargs_global={"resample_mean": False},
        wrapper_kwargs_type={"ReLU": {"moment_propagator": UnscentedTransform(scale, weights)}},
    ).to(kind)
    for name, variance in trained.variances.items():
        layer, _, parameter = name.rpartition(".")
        own = network.bnn.get_submodule(layer)._module_params
        assert torch.equal(own[f"{parameter}_mean"], trained.model.get_parameter(name))
        deviation = variance.double().sqrt()  # which is softplus of what is kept
        own[f"{parameter}_rho"].data = deviation.expm1().log().to(kind)
    network.eval()

    def moments(x: Tensor) -> Moments:
        found = network(MuVar(x))
        return found.mu, found.var

    return PeerPredictor(moments, moments)


PREDICTORS: dict[str, Callable[[Trained, float], PeerPredictor]] = {
    "laplace GLM": laplace_predictor("glm", "CurvlinopsGGN", "all"),
    "laplace GLM, BackPackGGN": laplace_predictor("glm", "BackPackGGN", "all"),
    "laplace GLM, AsdlGGN": laplace_predictor("glm", "AsdlGGN", "all"),
    "laplace GLM, last layer": laplace_predictor("glm", "CurvlinopsGGN", "last_layer"),
    "laplace NN": laplace_predictor("nn", "CurvlinopsGGN", "all"),
    "laplace NN, last layer": laplace_predictor("nn", "CurvlinopsGGN", "last_layer"),
    "fastbnns": fastbnns_predictor,
}
"""With laplace-torch's default back end where none is named."""


def per_call(work: Callable[[], Any], least: float) -> float:
    """Seconds of one call, on average over as many as take `least` seconds together."""
    start, calls = time.perf_counter(), 0
    while True:
        work()
        calls += 1
        taken = time.perf_counter() - start
        if taken >= least:
            return taken / calls


def against_plain(
    model: nn.Module, predict: Callable[[Tensor], Any], inputs: Tensor, least: float
) -> dict[str, float]:
    """Seconds of a prediction, and of a plain forward of the same inputs before and after it."""
    with torch.no_grad():
        before = per_call(lambda: model(inputs), least)
        own = per_call(lambda: predict(inputs), least)
        after = per_call(lambda: model(inputs), least)
    return {"seconds": own, "plain": (before + after) / 2}


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
    """The case at hand, and which peers want it frozen; or a trained network, and the peers' predictors of it."""

    def __init__(self) -> None:
        self._trained: Trained | None = None
        self._predictors: dict[tuple[str, float], PeerPredictor] = {}
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
        if "trained" in request:
            self._predictors = {}
            self._trained = read_trained(request["network"], Path(request["trained"]))
            return {"samples": samples(self._trained.batches)}
        if "predict" in request or "moments" in request:
            return self._prediction(request)
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

    def _prediction(self, request: dict[str, Any]) -> dict[str, Any]:
        """Times of a prediction for ``batch`` inputs, or moments of the outputs for all of them."""
        assert self._trained is not None
        name, prior = request.get("predict") or request["moments"], request["prior"]
        model, inputs = self._trained.model, self._trained.inputs
        if (name, prior) not in self._predictors:
            made = PREDICTORS[name](self._trained, prior)
            with torch.no_grad():
                made.predict(inputs[:2])
            self._predictors[name, prior] = made
        peer = self._predictors[name, prior]
        if "predict" in request:
            return against_plain(model, peer.predict, inputs[: request["batch"]], request["least"])
        assert peer.moments is not None
        with torch.no_grad():
            mean, variance = peer.moments(inputs)
        return {"mean": mean.tolist(), "variance": variance.tolist()}

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
    action.add_argument(
        "--serve", action="store_true", help="answer the benchmarks; in the peers' environment"
    )
    action.add_argument("--check", action="store_true", help="import the peers and print their versions")
    parser.add_argument("--standalone", action="store_true", help="borrow no packages of this environment")
    parser.add_argument("--memory", type=int, help="bytes that this process may allocate")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.install:
        install(options.install, options.standalone)
    elif options.serve:
        serve(options.memory, options.threads)
    else:
        import_peers()
        import fastbnns.bnn.base  # noqa: F401 (only here: it is no part of what fits are compared in)

        print(", ".join(f"{name} {found}" for name, found in versions().items()))


if __name__ == "__main__":
    main()
