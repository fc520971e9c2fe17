"""Where tensors lie: with any default device of torch's, and on whatever device there is."""

from __future__ import annotations

import ast
import asyncio
import json
import math
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
import torch
from networks import LIKELIHOODS, cnn, heads_of, outputs_for, short, targets_of, without_training
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import posthoc_uq as uq
from posthoc_uq.core import DeferredChecks, device_generators, full_precision, has_double, on_host
from posthoc_uq.heads.spectrum import Spectrum
from posthoc_uq.likelihoods import Categorical, resolve_likelihood
from posthoc_uq.likelihoods.draws import _placed_normals, normals
from posthoc_uq.methods import METHODS
from posthoc_uq.trained.contexts import UniformBox

CPU = torch.device("cpu")
Work = Callable[[torch.device], dict[str, Any]]
CHANGEABLE = [
    name for name in METHODS if name != "subnetwork" and (name == "message_passing" or not short(name).trains)
]
"""Methods whose posteriors take in data and give them back."""

# torch's functions that make a tensor of nothing, on torch's default device unless they are told where
MADE = frozenset(
    "arange as_tensor asarray empty empty_strided eye full linspace logspace ones rand randint randn randperm range "
    "scalar_tensor tensor tril_indices triu_indices zeros".split()
)


def calls_without_a_device(source: str) -> list[int]:
    """Lines that make a tensor without saying where."""
    found: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MADE:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and "device" not in {keyword.arg for keyword in node.keywords}:
                found.append(node.lineno)
    return found


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    assert calls_without_a_device("import torch\nx = torch.ones(2)\ny = torch.ones(2, device=x.device)") == [
        2
    ]
    root = Path(uq.__file__).parent
    found = {
        f"{path.relative_to(root)}:{line}"
        for path in sorted(root.rglob("*.py"))
        for line in calls_without_a_device(path.read_text(encoding="utf-8"))
    }
    assert not found


# What computes on the host alone: measures, pictures, the command line, and functions of what they are given there.
ON_HOST = ("app/cli/", "evaluation/", "likelihoods/metrics.py", "likelihoods/selective.py")
ON_HOST_TOO = {
    "curvature/kept_inputs.py": {"KeptInputs.batches"},
    "curvature/sweep.py": {"SweepTotals.add_log_likelihood"},
    "app/export.py": {"_PValues.__init__", "_last_at_most"},
    "fitting/leave_one_out.py": {"LeftOut.accuracy", "leave_one_out", "_of_classes"},
    "heads/moments.py": {"MomentsPredictor._functions.normals"},
    "likelihoods/conformal.py": {"p_values", "tuned_regularisation.size", "ConformalScores.rate_for"},
    "likelihoods/draws.py": {"normals"},
    "trained/function_space.py": {"gaussian_kl"},
}


def calls_for_float64(source: str) -> set[str]:
    """Functions that ask for float64 of a tensor, or make one of it, without saying that it is on the CPU."""
    found = set[str]()

    def visit(node: ast.AST, place: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            place = f"{place}.{node.name}".lstrip(".")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr != "finfo":
            given = [ast.unparse(each) for each in (*node.args, *(word.value for word in node.keywords))]
            wide = node.func.attr == "double" or "torch.float64" in given
            if wide and ".cpu()" not in ast.unparse(node.func) and "'cpu'" not in given:
                found.add(place)
        for child in ast.iter_child_nodes(node):
            visit(child, place)

    visit(ast.parse(source), "")
    return found


def test_float64_is_asked_for_in_one_place() -> None:
    """Some devices have none; `as_double` and `host_double` know which."""
    source = "def f(x):\n    return {}\n"
    for asked in (
        "x.double().cpu()",
        "x.to(torch.float64)",
        "torch.ones(2, dtype=torch.float64, device=x.device)",
    ):
        assert calls_for_float64(source.format(asked)) == {"f"}
    for right in ("x.cpu().double()", "as_double(x)", "torch.ones(2, dtype=torch.float64, device='cpu')"):
        assert not calls_for_float64(source.format(right))
    root, found = Path(uq.__file__).parent, dict[str, set[str]]()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(ON_HOST) and name != "core/devices.py":
            found[name] = calls_for_float64(path.read_text(encoding="utf-8"))
    assert {name: places for name, places in found.items() if places} == ON_HOST_TOO


class Foreign(Tensor):
    """A tensor as of a device without float64: what is computed with it is, too, until it is copied to the host."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        wanted = [*args[1:], *options.values()]
        if func is Tensor.double or (func is Tensor.to and torch.float64 in wanted):
            raise TypeError("the device has no float64")
        found = super().__torch_function__(func, types, args, options)
        return found.as_subclass(Tensor) if func is Tensor.cpu else found


def foreign(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Foreign)


class Answers(nn.Module):
    """A network whose outputs are on that device."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        y = self.network(x)
        return y if y.requires_grad else foreign(y)


def test_a_device_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets, measures, leave-one-out and the search for held-out data compute on the host what the device cannot."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.randint(0, 3, (60,))
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
    model = Answers(plain).eval()
    options: dict[str, Any] = {"prior_precision": 1.0, "progress": False}
    posterior = uq.fit(plain, [(x, y)], "kfac", **options)
    posterior = uq.calibrate(posterior, [(x, y)], progress=False)
    prediction = uq.wrap(plain, posterior)(x)
    spectrum = Spectrum(posterior, 1.0, torch.float32, CPU, 2**20)
    expected = prediction.set(0.8), prediction.quality(y), prediction.losses(y), spectrum.sizes
    left_out = uq.fit(plain, [(x, y)], progress=False)
    monkeypatch.setattr("posthoc_uq.core.devices._WITHOUT_DOUBLE", ("cpu", "mps"))
    object.__setattr__(prediction, "probs", foreign(prediction.probs))
    found = prediction.set(0.8), prediction.quality(y), prediction.losses(y)
    for one, other in zip(found, expected, strict=False):
        assert one == other if isinstance(one, dict) else torch.equal(one, other)
    for block in posterior.blocks.values():
        block.input_eigenvalues = foreign(block.input_eigenvalues)
    sizes = Spectrum(posterior, 1.0, torch.float32, CPU, 2**20).sizes
    torch.testing.assert_close(sizes.as_subclass(Tensor), expected[3], rtol=0, atol=0)
    again = uq.fit(model, [(x, y)], progress=False)
    assert again.temperature == pytest.approx(left_out.temperature, rel=1e-5)


def made_on_host(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make it on the CPU, whatever torch's default device is: it is the user's."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return make(*args, **kwargs)

    return made


@made_on_host
def network(outputs: int = 3, device: torch.device = CPU) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, outputs)]
    model = nn.Sequential(*layers).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    return model.to(device)


@made_on_host
def images(samples: int = 24, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    return torch.randn(samples, 1, 4, 4, generator=generator), labels


@made_on_host
def regression(samples: int = 24) -> tuple[Tensor, Tensor]:
    return images(samples)[0], torch.randn(samples, 2, generator=torch.Generator().manual_seed(2))


@made_on_host
def probabilities(samples: int) -> Tensor:
    return torch.rand(samples, 3, generator=torch.Generator().manual_seed(0)).softmax(1)


def batched(data: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(data[0].split(10), data[1].split(10), strict=True))


def described(posterior: uq.Posterior) -> dict[str, Any]:
    """What does not depend on the choice of an eigenbasis."""
    return posterior.variance() | {
        "log determinant": posterior.log_determinant(),
        "prior": posterior.prior_precision,
    }


def fitted(model: nn.Module, method: str = "inf", **options: Any) -> uq.Posterior:
    given: dict[str, Any] = {"layers": "last"} if method == "full" else {}
    given |= {"epochs": 1} if method == "function_space" else {"prior_precision": 1.0}
    data = batched(regression() if options.get("likelihood") == "regression" else images())
    return uq.fit(model, data, method=method, progress=False, **given | options)


def fits(method: str, **options: Any) -> Work:
    return lambda device: described(
        fitted(network(2 if "likelihood" in options else 3, device), method, **options)
    )


def predicts(head: str, method: str = "inf", **options: Any) -> Work:
    def work(device: torch.device) -> dict[str, Any]:
        model, x = network(device=device), images(6, 3)[0]
        predictor = uq.wrap(model, fitted(model, method), head, **options)
        found = predictor(x.to(device)).to_dict() | {"top": predictor.novelty(x.to(device), of="top")}
        assert {tensor.device.type for tensor in found.values()} == {device.type}
        return found | {f"loader {k}": v for k, v in predictor.predict([x], progress=False).to_dict().items()}

    return work


def regresses(device: torch.device) -> dict[str, Any]:
    model = network(2, device)
    posterior = fitted(model, likelihood="regression", noise_variance=0.1)
    prediction = uq.wrap(model, posterior, "moments")(images(6, 3)[0].to(device))
    return prediction.to_dict() | {"drawn": prediction.sample(2, torch.Generator().manual_seed(0))}


def moves_the_mean(device: torch.device) -> dict[str, Any]:
    """Of a last layer, exactly."""
    model, found = network(2, device), dict[str, Any]()
    methods: tuple[Any, ...] = ("full", uq.KFAC(keep_grams=True))
    for method in methods:
        posterior = fitted(model, method, layers="last", likelihood="regression", noise_variance=0.1)
        moved = uq.update(posterior, batched(regression(10)), mean=True, progress=False)
        found[str(method)] = uq.wrap(model, moved)(images(6, 3)[0].to(device)).to_dict()
    return found


def predicts_many_classes(device: torch.device) -> dict[str, Any]:
    """So many that bases of the outputs are narrow."""
    model, (x, _), found = network(1100, device), images(), dict[str, Any]()
    for method in ("kfac", "efb"):
        posterior = fitted(model, method, layers="last")
        found[method] = uq.wrap(model, posterior)(x[:3].to(device)).probs
    return found


def scales_classes(device: torch.device) -> dict[str, Any]:
    """By every head, and for given rates."""
    model, found = network(device=device), dict[str, Any]()
    x = images(6, 3)[0].to(device)
    for scaling in ("bias", "vector"):
        posterior = uq.calibrate(
            fitted(model, "diag"),
            batched(images(90, 4)),
            scaling=scaling,
            class_rates=[0.2, 0.3, 0.5],
            progress=False,
        )
        found[scaling] = posterior.class_shift
        for head in heads_of(posterior):
            options: dict[str, Any] = {"n_samples": 3} if head == "sampling" else {}
            found[f"{scaling}, {head}"] = uq.wrap(model, posterior, head, **options)(x).to_dict()
    return found


def tunes(device: torch.device) -> dict[str, Any]:
    posterior = fitted(network(device=device))
    posterior = uq.tune(posterior, batched(images(seed=4)), progress=False, max_evaluations=2)
    found: dict[str, Any] = {"validation": posterior.prior_precision}
    for name, options in {"evidence": {}, "by layer": {"per_layer": True}}.items():
        posterior = uq.tune(posterior, progress=False, **options)
        found[name] = posterior.prior_precision
    return found


def computes_weights(device: torch.device) -> dict[str, Any]:
    """By its own code, and looks up rows of an embedding."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.words = network(), nn.Embedding(5, 3)
            with torch.no_grad():
                self.words.weight.copy_(torch.linspace(-1, 1, 15, device="cpu").reshape(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            conv, last = self.inner[0], self.inner[4]  # type: ignore[index]
            weight = conv.weight / conv.weight.square().mean((1, 2, 3), keepdim=True).sqrt()
            hidden = nn.functional.conv2d(x, weight, conv.bias, padding=1).relu()
            ids = (x[:, 0, 0].abs() * 2).long().clamp(max=4)
            return last(nn.functional.max_pool2d(hidden, 2).flatten(1)) + self.words(ids).sum(1)

    with torch.device("cpu"):
        model = Own().eval()
    model, x = model.to(device), images(6, 3)[0].to(device)
    found = dict[str, Any]()
    for method in ("inf", "kfac"):
        posterior = fitted(model, method, layers="everything")
        found[method] = described(posterior) | {
            "at": uq.wrap(model, posterior, "linearized").functional_variance(x)
        }
    return found


def searches_faithfully(device: torch.device) -> dict[str, Any]:
    return {
        "prior": uq.fit(
            network(device=device), batched(images()), layers="all", progress=False
        ).prior_precision
    }


def evaluates(device: torch.device) -> dict[str, Any]:
    model = network(device=device)
    predictor = uq.wrap(model, fitted(model, "diag"), n_samples=3)
    result = uq.evaluate(predictor, batched(images(seed=4)), ood_loaders=[images()[0] * 3], progress=False)
    return {"quality": result.to_dict()["quality"]}


def stores(device: torch.device) -> dict[str, Any]:
    model = network(device=device)
    with TemporaryDirectory() as folder:
        uq.save(fitted(model), Path(folder) / "posterior.h5")
        return described(uq.load(Path(folder) / "posterior.h5", model))


def scores(device: torch.device) -> dict[str, Any]:
    from posthoc_uq.evaluation import metrics

    probs, labels = probabilities(12).to(device), images(12)[1].to(device)
    errors = (labels == 0).to(probs)
    mean, sd, values = probs[:, 0], probs[:, 1] + 0.1, probs[:, 2]
    return {
        "top k": metrics.top_k_accuracy(probs, labels, 2),
        **{
            f"{score.__name__} {binning}": score(probs, labels, 5, binning)
            for score in (metrics.expected_calibration_error, metrics.classwise_calibration_error)
            for binning in ("equal_width", "equal_mass")
        },
        "auroc": metrics.ood_auroc(probs[:, 0], probs[:, 1]),
        "risk": metrics.risk_coverage(probs[:, 0], errors).risk,
        "auc": metrics.selective_auc(probs[:, 0], probs, labels, [0.1, 0.3]),
        "coverage": metrics.coverage_curve(mean, sd, values).observed,
        "crps": metrics.crps_gaussian(mean, sd, values),
    }


def likelihoods(name: str) -> Work:
    """A fit of each head's own prior precision, its predictions, and data that come in and go out."""

    def work(device: torch.device) -> dict[str, Any]:
        model, x = network(outputs_for(resolve_likelihood(name)), device), images()[0]
        y = targets_of(network(outputs_for(resolve_likelihood(name))), x, name)
        found: dict[str, Any] = {}
        for head in ("linearized", "sampling", "moments"):
            options: dict[str, Any] = {"likelihood": name, "progress": False}
            if head == "linearized":  # a search ends within 0.03 decades, where rounding lets it
                searched = uq.fit(model, batched((x, y)), "diag", head=head, **options).prior_precision
                found["decades of the prior"] = [10 + math.log10(p) for p in _values(searched)]
            posterior = uq.fit(model, batched((x, y)), "diag", prior_precision=1.0, **options)
            predictor = uq.wrap(model, posterior, head, **({"n_samples": 3} if head == "sampling" else {}))
            prediction = predictor(x[:6].to(device))
            found[head] = prediction.to_dict() | dict(prediction.scores())
            found[f"{head}, targets"] = [prediction.log_prob(part) for part in (y[:6], y[:6].to(device))]
        for remove in (False, True):
            posterior = uq.update(posterior, batched((1.3 * x[:12], y[:12])), remove=remove, progress=False)
            found[f"updated, {remove}"] = described(posterior)
        posterior = uq.tune(posterior, batched((x, y)), progress=False, max_evaluations=2, n_samples=2)
        predictor = uq.wrap(model, posterior, "moments")
        result = uq.evaluate(predictor, batched((x, y)), ood_loaders=[x * 3], progress=False)
        return found | {"tuned": posterior.prior_precision, "quality": result.to_dict()["quality"]}

    return work


def _values(prior: float | dict[str, float]) -> list[float]:
    return list(prior.values()) if isinstance(prior, dict) else [prior]


def trains(method: str, likelihood: str = "classification", **options: Any) -> Work:
    """A training, as it is and after it has been a file on the CPU."""

    def work(device: torch.device) -> dict[str, Any]:
        outputs = outputs_for(resolve_likelihood(likelihood))
        model, x = network(outputs, device), images()[0]
        data = batched((x, targets_of(network(outputs), x, likelihood)))
        given: dict[str, Any] = {"likelihood": likelihood, "divergence": None, "progress": False}
        posterior = uq.fit(model, data, short(method, **options), val_loader=data, **given)
        found: dict[str, Any] = {"fit": posterior.variance()}
        with TemporaryDirectory() as folder:
            uq.save(posterior, Path(folder) / "posterior.h5")
            for name, place in (("home", device), ("CPU", CPU)):
                read = uq.load(Path(folder) / "posterior.h5", model, device=place)
                for head in heads_of(read):
                    kept = uq.wrap(model, read, head, **({"n_samples": 3} if head == "sampling" else {}))
                    found[f"{head}, from {name}"] = kept(x[:6].to(device)).to_dict()
        return found

    return work


def changes(method: str) -> Work:
    """Data that come in and go out of a posterior that was a file, on the model's device or on the CPU."""

    def work(device: torch.device) -> dict[str, Any]:
        model, x = network(device=device), images()[0]
        found: dict[str, Any] = {}
        with TemporaryDirectory() as folder:
            sums: dict[str, Any] = {"kfac": {"keep_grams": True}, "message_passing": {"posterior": "full"}}
            uq.save(fitted(model, method, **sums.get(method, {})), Path(folder) / "posterior.h5")
            for name, place in (("home", device), ("CPU", CPU)):
                posterior = uq.load(Path(folder) / "posterior.h5", model, device=place)
                for remove in (False, True):
                    changed = batched((1.3 * x[:12], images()[1][:12]))
                    posterior = uq.update(posterior, changed, remove=remove, progress=False)
                    found[f"updated, {remove}, {name}"] = described(posterior)
        return found

    return work


def weighs(device: torch.device) -> dict[str, Any]:
    posterior = fitted(
        network(device=device), batch_to_weights=lambda batch: batch[0][:, 0, 0, 0].clamp(min=0)
    )
    weights = [torch.full_like(own, 2.0) for own in posterior.variance().values()]
    priors = dict(zip(posterior.variance(), weights, strict=True))
    own = uq.fit(network(device=device), batched(images()), "diag", prior_precision=priors, progress=False)
    return described(posterior) | {
        "of each weight": own.variance(),
        "evidence": own.log_marginal_likelihood(),
    }


def positions(method: str) -> Work:
    """Tokens with a class each: fitted, changed, tuned and evaluated."""

    def work(device: torch.device) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        with torch.device("cpu"):
            x, y = torch.randn(6, 4, 3, generator=generator), torch.randint(0, 3, (6, 4), generator=generator)
            model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).eval()
            for parameter in model.parameters():
                nn.init.normal_(parameter, 0.0, 0.5, generator=generator)
        y[0, 0] = -100
        model = model.to(device)
        data, given = batched((x, y)), {"likelihood": Categorical(class_dim=-1), "progress": False}
        posterior = uq.fit(model, data, method, prior_precision=1.0, **given)
        found: dict[str, Any] = {}
        for head in heads_of(posterior):
            options: dict[str, Any] = {"n_samples": 3} if head == "sampling" else {}
            predictor = uq.wrap(model, posterior, head, **options)
            prediction = predictor(x.to(device))
            found[head] = prediction.to_dict() | dict(prediction.scores())
            found[f"{head}, targets"] = [prediction.log_prob(part) for part in (y, y.to(device))]
            found[f"{head}, novelty"] = predictor.novelty(x.to(device))
            result = uq.evaluate(predictor, data, ood_loaders=[x * 3], progress=False)
            found[f"{head}, quality"] = result.to_dict()["quality"]
        some = uq.wrap(model, posterior, "linearized", positions=[0, 2])
        found["some"] = some(x.to(device)).to_dict()
        return found | {"updated": described(uq.update(posterior, batched((1.3 * x, y)), progress=False))}

    return work


def thins(device: torch.device) -> dict[str, Any]:
    """What can be asked of weights that may be off."""
    x = images()[0]
    model = network(device=device)
    posterior = uq.fit(model, batched(images()), short("latent_binary"), progress=False)
    median = uq.sparse.median(posterior)
    return {
        "kept": uq.sparse.summary(posterior).kept,
        "median": uq.wrap(model, median)(x[:6].to(device)).to_dict(),
        "masked": uq.sparse.model(model, posterior, "masked")(x[:6].to(device)),
    }


def serves(device: torch.device) -> dict[str, Any]:
    from posthoc_uq.app import Service

    model = network(device=device)
    service = Service(uq.wrap(model, fitted(model, "diag"), n_samples=3))
    try:
        body = json.dumps({"inputs": images(6, 3)[0].tolist()}).encode()
        answers = asyncio.run(service.predict(body, {"content-type": "application/json"}, many=True))
        return dict(enumerate(answers))
    finally:
        service.close()


WORKS: dict[str, Work] = {
    **{method: fits(method) for method in without_training()},
    "exact Fisher": fits("inf", fisher="exact"),
    "sketch": fits("inf", basis="sketch", rank=4),
    "regression, its noise": fits("inf", likelihood="regression"),
    "sampling": predicts("sampling", "diag", n_samples=3),
    "sampling, pairs": predicts("sampling", "diag", n_samples=3, antithetic=True),
    "linearized": predicts("linearized"),
    "linearized, dense": predicts("linearized", "full"),
    "linearized, jvp": predicts("linearized", "diag", engine="jvp", n_probes=4),
    "linearized, two classes": predicts("linearized", outputs=2),
    "moments": predicts("moments"),
    "moments, full": predicts("moments", cov="full"),
    "moments, bridge": predicts("moments", link="bridge"),
    "regression": regresses,
    "moved mean": moves_the_mean,
    "scaled classes": scales_classes,
    "many classes": predicts_many_classes,
    "tuning": tunes,
    "faithful": searches_faithfully,
    "weights by a model's own code": computes_weights,
    "evaluation": evaluates,
    "file": stores,
    "metrics": scores,
    **{f"likelihood {name}": likelihoods(name) for name in LIKELIHOODS},
    **{f"changes {name}": changes(name) for name in CHANGEABLE},
    "weights of samples, priors of weights": weighs,
    **{f"positions {name}": positions(name) for name in ("inf", "diag")},
    **{name: trains(name) for name in METHODS if short(name).trains},
    "message_passing, regression": trains("message_passing", "regression", posterior="full"),
    "message_passing, binary": trains("message_passing", "binary"),
    "message_passing, all layers": trains("message_passing", layers="all"),
    "utvi, regression": trains("utvi", "regression"),
    "latent_binary, regression": trains("latent_binary", "regression"),
    "weights that are off": thins,
    "serving": serves,
}
CONTEXTS: dict[str, Any] = {
    "batch": "batch",
    "monochrome": "monochrome",
    "uniform": "uniform",
    "box": UniformBox(-1.0, torch.ones(1, 4, 4)),
    "loader": [images(8, 6)[0]],
}
TRAININGS = {
    **{name: fits("function_space", context=context) for name, context in CONTEXTS.items()},
    "initialised": fits("function_space", prior_mean="random_init"),
}


DRAWN = ("latent_binary", "latent_binary, regression", "weights that are off", "function_space")
"""Trainings whose noise a device draws by its own generator, so that a few steps end near each other."""


def forget_draws() -> None:
    for kept in (normals, _placed_normals):
        kept.cache_clear()


def assert_same(found: Any, expected: Any, where: str, exact: bool, atol: float = 1e-3) -> None:
    if isinstance(expected, Tensor):
        if exact:
            torch.testing.assert_close(
                found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}"
            )
        elif expected.is_floating_point() and "variation" not in where:  # counts jump at a tie
            found, expected = found.cpu().to(expected.dtype), expected.cpu()
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=atol, msg=lambda m: f"{where}: {m}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}, {name}", exact, atol)
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for one, other in zip(found, cast("list[Any]", expected), strict=True):
            assert_same(one, other, where, exact, atol)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=0 if exact else 2e-2, nan_ok=True), where
    else:
        assert found == expected, where


@pytest.fixture
def tf32() -> Iterator[Callable[[bool], None]]:
    """Turns TF32 on or off for convolutions and products: GPUs then round the factors of float32 to 10 bits."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()

    def turn(on: bool) -> None:
        torch.backends.cudnn.allow_tf32 = on
        torch.set_float32_matmul_precision("high" if on else "highest")

    yield turn
    torch.set_float32_matmul_precision(before[1])
    torch.backends.cudnn.allow_tf32 = before[0]


# which share their code with another one here
ALIKE = {f"changes {method}" for method in ("efb", "kfac", "full")} | {
    "positions diag",
    "message_passing, regression",
    "message_passing, all layers",
    "utvi, regression",
    "latent_binary, regression",
}
ALIKE |= {
    f"likelihood {name}"
    for name in ("binary", "multilabel", "regression", "poisson", "gamma", "negative_binomial", "ordinal")
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.study] * (name in ALIKE)) for name in WORKS | TRAININGS]
)
def test_torchs_default_device_changes_nothing(name: str) -> None:
    """Tensors of the default device ``meta`` have no numbers: nothing may be computed with one."""
    work = (WORKS | TRAININGS)[name]
    expected = work(CPU)
    forget_draws()
    with torch.device("meta"):
        found = work(CPU)
    assert_same(found, expected, name, exact=True)


@pytest.mark.device
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", WORKS)
def test_a_device_finds_what_the_cpu_does(
    name: str, device: torch.device, tf32: Callable[[bool], None]
) -> None:
    tf32(False)  # trainings and draws are the user's own passes, at the user's precision
    assert_same(WORKS[name](device), WORKS[name](CPU), name, exact=False, atol=0.1 if name in DRAWN else 1e-3)


@pytest.mark.device
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["inf", "kfac", "linearized", "likelihood poisson", "likelihood ordinal"])
def test_tf32_changes_no_posterior_and_no_linearised_variance(
    name: str, device: torch.device, tf32: Callable[[bool], None]
) -> None:
    tf32(True)
    found = WORKS[name](device)
    tf32(False)
    assert_same(found, WORKS[name](device), name, exact=False)


def test_full_precision_ends_with_the_last_that_asked_for_it(tf32: Callable[[bool], None]) -> None:
    def settings() -> tuple[bool, str]:
        return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()

    tf32(True)
    one, other = full_precision(), full_precision()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert settings() == (False, "highest")
    other.__exit__(None, None, None)
    assert settings() == (True, "high")
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(ZeroDivisionError), full_precision():
        raise ZeroDivisionError
    assert settings() == (True, "medium")


@pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="torch has one setting for all operations"
)
@pytest.mark.parametrize(
    "given", ["", "cudnn.conv", "cuda.matmul", "mkldnn.matmul", "all"], ids=lambda name: name or "none"
)
def test_full_precision_where_each_operation_has_its_own(given: str) -> None:
    backends: Any = torch.backends
    kinds = {
        "cuda.matmul": backends.cuda.matmul,
        "mkldnn.matmul": backends.mkldnn.matmul,
        "cudnn.conv": backends.cudnn.conv,
        "cudnn.rnn": backends.cudnn.rnn,
    }

    def settings() -> dict[str, str]:
        return {name: kind.fp32_precision for name, kind in kinds.items()}

    before = settings()
    changed = backends if given == "all" else kinds.get(given)
    try:
        if changed is not None:
            changed.fp32_precision = "ieee" if given == "cudnn.conv" else "tf32"
        own = settings()
        with full_precision():
            assert set(settings().values()) <= {"ieee", "none"}
        assert settings() == own
        if given == "all":  # they still go with it
            backends.fp32_precision = "ieee"
            assert set(settings().values()) == {"ieee"}
    finally:
        backends.fp32_precision = "none"
        for name, kind in kinds.items():
            kind.fp32_precision = before[name]


@pytest.mark.device
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", WORKS | TRAININGS)
def test_the_device_as_torchs_default_changes_nothing(name: str, device: torch.device) -> None:
    work = (WORKS | TRAININGS)[name]
    for place in (CPU, device):
        expected = work(place)
        forget_draws()
        with torch.device(device):
            found = work(place)
        assert_same(found, expected, name, exact=False)


@pytest.mark.device
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_on_a_device(name: str, device: torch.device) -> None:
    found = TRAININGS[name](device)
    prior = found.pop("prior")
    assert prior == TRAININGS[name](CPU)["prior"]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found.values())


@pytest.mark.device
@pytest.mark.filterwarnings("ignore:The posterior's prior precision")
@pytest.mark.parametrize("head", ["sampling", "linearized", "moments"])
@pytest.mark.parametrize("method", METHODS)
def test_a_posterior_and_a_model_on_two_devices(head: str, method: str, device: torch.device) -> None:
    far, near, x = network(device=device), network(), images(6, 3)[0]
    options = {"n_samples": 3} if head == "sampling" else {}
    posterior = fitted(far, method)
    expected = uq.wrap(far, posterior, head, **options)(x.to(device)).to_dict()
    with TemporaryDirectory() as folder:
        uq.save(posterior, Path(folder) / "posterior.h5")
        at_home = uq.load(Path(folder) / "posterior.h5", far, device="cpu")
        away = uq.load(Path(folder) / "posterior.h5", near, device=device)
    for model, own, place in ((near, posterior, CPU), (near, away, CPU), (far, at_home, device)):
        found = uq.wrap(model, own, head, **options)(x.to(place)).to_dict()
        assert {tensor.device.type for tensor in found.values()} == {place.type}
        assert_same(found, expected, head, exact=False)


@pytest.mark.device
@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("sampling", {"n_samples": 3}),
        ("linearized", {}),
        ("linearized", {"engine": "jvp", "n_probes": 4}),
        ("moments", {}),
        ("moments", {"cov": "full"}),
    ],
    ids=str,
)
def test_a_predictor_moves(head: str, options: dict[str, Any], device: torch.device) -> None:
    model, x = network(device=device), images(6, 3)[0]
    before = {name: (p.device, p.clone()) for name, p in model.named_parameters()}
    predictor = uq.wrap(model, fitted(model), head, **options)
    expected = {name: tensor.cpu() for name, tensor in predictor(x.to(device)).to_dict().items()}
    for place in (CPU, device):
        assert predictor.to(place).device.type == place.type
        found = predictor(x.to(place)).to_dict()
        assert {tensor.device.type for tensor in found.values()} == {place.type}
        assert_same(found, expected, head, exact=False)
        assert_same(predictor.predict([x], progress=False).to_dict(), expected, head, exact=False)
    for name, parameter in model.named_parameters():
        assert parameter.device == before[name][0] and torch.equal(parameter, before[name][1])


@pytest.mark.device
def test_what_is_given_may_be_on_the_device(device: torch.device) -> None:
    noise, low = torch.tensor([0.1, 0.2], device=device), torch.full((1, 4, 4), -1.0, device=device)
    posterior = fitted(network(2, device), likelihood="regression", noise_variance=noise)
    torch.testing.assert_close(posterior.noise_variance, torch.tensor([0.1, 0.2], dtype=torch.float64))
    posterior = posterior.with_settings(prior_precision=torch.tensor(2.0, device=device))
    assert posterior.prior_precision == 2.0
    fitted(network(device=device), "function_space", context=UniformBox(low, -low))
    x, y = (tensor.to(device) for tensor in images())
    found = uq.fit(network(device=device), [(x, y)], layers="all", prior_precision=1.0, progress=False)
    assert_same(found.variance(), fitted(network()).variance(), "a loader on the device", exact=False)


@pytest.mark.device
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_a_fit_on_a_device_goes_on(likelihood: str, device: torch.device, tmp_path: Path) -> None:
    data = batched(regression() if likelihood == "regression" else images())
    options: dict[str, Any] = {"likelihood": likelihood, "prior_precision": 1.0, "progress": False}
    model, read = network(2 if likelihood == "regression" else 3, device), 0

    class Breaks:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            nonlocal read
            for batch in data:
                read += 1
                if read == 6:
                    raise InterruptedError
                yield batch

    options |= {"checkpoint": tmp_path / "checkpoint.h5", "checkpoint_every": 1}
    with pytest.raises(InterruptedError):
        uq.fit(model, Breaks(), **options)
    found = uq.fit(model, Breaks(), **options)
    whole = uq.fit(model, data, **{**options, "checkpoint": None})
    assert_same(described(found), described(whole), likelihood, exact=True)


@pytest.mark.device
def test_float64_is_refused_where_a_device_has_none(device: torch.device) -> None:
    if has_double(device):
        assert fitted(network(device=device), dtype=torch.float64).dtype == torch.float64
    else:
        with pytest.raises(uq.PosthocUQError, match=r"leave dtype out, or move the model to the CPU"):
            fitted(network(device=device), dtype=torch.float64)


@pytest.mark.device
def test_the_devices_random_state_stays_as_it_was(device: torch.device) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(device=device)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1e-3 * torch.randn(3, device=x.device)

    model = Draws().eval()

    def states() -> list[Tensor]:
        return [module.get_rng_state(*place) for module, place in device_generators()]

    before = states()
    predictor = uq.wrap(model, fitted(model), n_samples=3)
    predictor.predict([images(6)[0]], progress=False)
    assert all(torch.equal(one, other) for one, other in zip(states(), before, strict=True))


@pytest.mark.device
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_program_for_a_device(device: torch.device) -> None:
    """With batch normalisation, which takes fewer samples in a batch there."""
    model, x = cnn().to(device), images(6, 3)[0].to(device)
    predictor = uq.wrap(model, fitted(model, "diag"), "sampling", n_samples=2)
    found = uq.export(predictor, x).module()(x[:4])
    torch.testing.assert_close(found.probs, predictor(x[:4]).probs)


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: numbers and tensors that come to it, sizes that it must know."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        source = args[1] if name == "copy_" else args[0] if args else None
        if isinstance(source, Tensor) and source.device.type != "cpu":
            copied = name in ("_to_copy", "copy_") and found.device.type == "cpu"
            self.count += copied or name in (
                "_local_scalar_dense",
                "nonzero",
                "_unique2",
                "unique_dim",
                "equal",
            )
        return found


def waits_a_batch(work: Callable[[list[tuple[Tensor, Tensor]]], Any]) -> float:
    """How many more there are for each batch more."""
    counts: list[int] = []
    for batches in (3, 7):
        data = images(8 * batches)
        loader = list(zip(data[0].split(8), data[1].split(8), strict=True))
        with Waits() as waits:
            work(loader)
        counts.append(waits.count)
    return (counts[1] - counts[0]) / 4


def counting_device(device: torch.device) -> torch.device:
    if not has_double(device):
        pytest.skip(f"'{device}' has no float64, which is computed on the host")
    return device


@pytest.mark.device
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("method", "sweeps"), [("inf", 2), ("kfac", 1), ("full", 1)])
def test_a_sweep_looks_at_the_device_once_a_batch(method: str, sweeps: int, device: torch.device) -> None:
    model = network(device=counting_device(device))
    options: dict[str, Any] = {"layers": "last"} if method == "full" else {}
    options |= {"method": method, "prior_precision": 1.0, "progress": False}
    assert waits_a_batch(lambda loader: uq.fit(model, loader, **options)) <= sweeps


@pytest.mark.device
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_training_looks_at_the_device_twice_a_step(device: torch.device) -> None:
    """Once for whether the covariances have Cholesky factors, on which its way depends, once for all else."""
    model, counts = network(device=counting_device(device)), list[int]()
    for epochs in (1, 3):
        with Waits() as waits:
            fitted(model, "function_space", epochs=epochs, context="batch", body="sample")
        counts.append(waits.count)
    assert counts[1] - counts[0] <= 2 * 2 * len(batched(images()))


@pytest.mark.device
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("head", "waits"), [("sampling", 1), ("linearized", 2), ("moments", 1)])
def test_a_prediction_comes_in_one_copy(head: str, waits: int, device: torch.device) -> None:
    """The linearised head looks once more, at what has lost too many digits."""
    model = network(device=counting_device(device))
    predictor = uq.wrap(model, fitted(model), head, **({"n_samples": 3} if head == "sampling" else {}))
    predictor(images(8)[0].to(device))
    assert waits_a_batch(lambda loader: predictor.predict(loader, progress=False)) <= waits


@pytest.mark.device
def test_an_evaluation_copies_little(device: torch.device) -> None:
    model = network(device=counting_device(device))
    predictor = uq.wrap(model, fitted(model), "moments")
    # one of them looks whether the model's weights changed
    assert waits_a_batch(lambda loader: uq.evaluate(predictor, loader, progress=False)) <= 6


@pytest.mark.device
def test_tensors_that_come_to_the_host_together_are_the_same(device: torch.device) -> None:
    tensors = [
        torch.tensor(True),
        torch.arange(3, dtype=torch.uint8),
        torch.tensor([[1.5, float("nan")], [-0.0, float("inf")]]),
        torch.arange(-2, 2, dtype=torch.int64).reshape(2, 2).T,
        torch.zeros(0, 3),
        torch.tensor([1.25, -2.0], dtype=torch.bfloat16),
        torch.tensor(7, dtype=torch.int16),
    ]
    far = [tensor.to(device) for tensor in tensors]
    for found in (on_host(*far), on_host(*far[:3], *tensors[3:])):
        for own, expected in zip(found, tensors, strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=0, equal_nan=True)
            assert (
                own.untyped_storage().nbytes() <= max(1, own.numel() * own.element_size()) or own is expected
            )
    needs = torch.ones(2, device=device, requires_grad=True)
    assert on_host(needs, far[0])[0].requires_grad


class TestLooks:
    """Of a batch that is read when it is done: the first error is the one that was asked for first."""

    def test_labels_that_are_out_of_range(self) -> None:
        for likelihood, x, y in (
            ("classification", images(8)[0], torch.tensor([0, 1, 2, 0, 1, 2, 0, 3])),
            ("classification", images(8)[0], torch.tensor([0, 1, 2, 0, 1, 2, 0, -100])),
            ("regression", images(8)[0], torch.full((8, 3), float("inf"))),
        ):
            for fisher in ("mc", "empirical"):
                with pytest.raises(uq.PosthocUQError, match=r"^Batch 1: (Labels run from|Some targets)"):
                    good = (x, torch.zeros_like(y))
                    options: dict[str, Any] = {"noise_variance": 1.0} if likelihood == "regression" else {}
                    uq.fit(
                        network(),
                        [good, (x, y)],
                        layers="all",
                        likelihood=likelihood,
                        fisher=fisher,
                        progress=False,
                        **options,
                    )

    def test_a_likelihood_with_a_check_of_its_own(self) -> None:
        class Strict(Categorical):
            def check(self, outputs: Tensor, targets: Tensor | None) -> None:
                super().check(outputs, targets)
                if targets is not None and bool((targets == 2).any()):
                    raise uq.PosthocUQError("Class 2 is not wanted.")

        with pytest.raises(uq.PosthocUQError, match=r"^Batch 0: Class 2 is not wanted"):
            uq.fit(
                network(),
                batched(images()),
                layers="all",
                likelihood=Strict(),
                prior_precision=1.0,
                progress=False,
            )

    def test_in_the_order_of_asking(self) -> None:
        checks, found = DeferredChecks(), list[int]()
        for number in range(3):
            checks.add(torch.tensor(number), lambda value: found.append(int(value)))
        assert not found
        checks.run()
        checks.run()
        assert found == [0, 1, 2]
