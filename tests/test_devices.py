"""Where tensors lie: with any default device of torch's, and on whatever device there is."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.contexts import UniformBox
from posthoc_uq.heads.draws import normals

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


def on_host(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make it on the CPU, whatever torch's default device is: it is the user's."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return make(*args, **kwargs)

    return made


@on_host
def network(outputs: int = 3) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, outputs)]
    model = nn.Sequential(*layers).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    return model


@on_host
def images(samples: int = 24, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    return torch.randn(samples, 1, 4, 4, generator=generator), labels


@on_host
def regression(samples: int = 24) -> tuple[Tensor, Tensor]:
    return images(samples)[0], torch.randn(samples, 2, generator=torch.Generator().manual_seed(2))


@on_host
def probabilities(samples: int) -> Tensor:
    return torch.rand(samples, 3, generator=torch.Generator().manual_seed(0)).softmax(1)


def batched(data: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(data[0].split(10), data[1].split(10), strict=True))


def drawn(posterior: uq.Posterior) -> dict[str, Tensor]:
    return posterior.sample(2, torch.Generator().manual_seed(5))


def fitted(model: nn.Module, method: str = "inf", **options: Any) -> uq.Posterior:
    given: dict[str, Any] = {"layers": "last"} if method == "full" else {}
    given |= {"epochs": 1} if method == "function_space" else {"prior_precision": 1.0}
    data = batched(regression() if options.get("likelihood") == "regression" else images())
    return uq.fit(model, data, method=method, progress=False, **given | options)


def fits(method: str, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: drawn(fitted(network(2 if "likelihood" in options else 3), method, **options))


def predicts(head: str, method: str = "inf", **options: Any) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        model, x = network(), images(6, 3)[0]
        predictor = uq.wrap(model, fitted(model, method), head, **options)
        found = predictor(x).to_dict() | {"top": predictor.novelty(x, of="top")}
        return found | {f"loader {k}": v for k, v in predictor.predict([x], progress=False).to_dict().items()}

    return work


def regresses() -> dict[str, Any]:
    model = network(2)
    posterior = fitted(model, likelihood="regression", noise_variance=0.1)
    prediction = uq.wrap(model, posterior, "moments")(images(6, 3)[0])
    return prediction.to_dict() | {"drawn": prediction.sample(2, torch.Generator().manual_seed(0))}


def tunes() -> dict[str, Any]:
    posterior = fitted(network())
    uq.tune(posterior, batched(images(seed=4)), progress=False, max_evaluations=2)
    found = {"validation": posterior.prior_precision}
    for name, options in {"evidence": {}, "by layer": {"per_layer": True}}.items():
        uq.tune(posterior, progress=False, **options)
        found[name] = str(posterior.prior_precision)
    return found


def searches_faithfully() -> dict[str, Any]:
    return {"prior": uq.fit(network(), batched(images()), progress=False).prior_precision}


def evaluates() -> dict[str, Any]:
    model = network()
    predictor = uq.wrap(model, fitted(model), n_samples=3)
    return uq.evaluate(
        predictor, batched(images(seed=4)), ood_loaders=[images()[0] * 3], progress=False
    ).to_dict()


def stores() -> dict[str, Any]:
    model = network()
    with TemporaryDirectory() as folder:
        uq.save(fitted(model), Path(folder) / "posterior.h5")
        return drawn(uq.load(Path(folder) / "posterior.h5", model))


def scores() -> dict[str, Any]:
    from posthoc_uq import metrics

    probs, labels = probabilities(12), images(12)[1]
    errors = (labels == 0).double()
    mean, sd, values = probs[:, 0], probs[:, 1] + 0.1, probs[:, 2]
    return {
        "top k": metrics.top_k_accuracy(probs, labels, 2),
        **{
            f"{score.__name__} {binning}": score(probs, labels, 5, binning)
            for score in (metrics.expected_calibration_error, metrics.classwise_calibration_error)
            for binning in metrics.BINNINGS
        },
        "auroc": metrics.ood_auroc(probs[:, 0], probs[:, 1]),
        "risk": metrics.risk_coverage(probs[:, 0], errors).risk,
        "auc": metrics.selective_auc(probs[:, 0], probs, labels, [0.1, 0.3]),
        "coverage": metrics.coverage_curve(mean, sd, values).observed,
        "crps": metrics.crps_gaussian(mean, sd, values),
    }


WORKS: dict[str, Callable[[], dict[str, Any]]] = {
    **{method: fits(method) for method in ("inf", "efb", "kfac", "diag", "full", "function_space")},
    "exact Fisher": fits("inf", fisher="exact"),
    "sketch": fits("inf", basis="sketch", rank=4),
    "regression, its noise": fits("inf", likelihood="regression"),
    **{
        f"context {name}": fits("function_space", context=context, initial="diag")
        for name, context in {
            "batch": "batch",
            "monochrome": "monochrome",
            "uniform": "uniform",
            "box": UniformBox(-1.0, torch.ones(1, 4, 4)),
            "loader": [images(8, 6)[0]],
        }.items()
    },
    "sampling": predicts("sampling", n_samples=3),
    "sampling, seeds": predicts("sampling", n_samples=3, keep="seeds", antithetic=True),
    "linearized": predicts("linearized"),
    "linearized, dense": predicts("linearized", "full"),
    "linearized, jvp": predicts("linearized", engine="jvp", n_probes=4),
    "linearized, two classes": predicts("linearized", outputs=2),
    "moments": predicts("moments"),
    "moments, full": predicts("moments", cov="full"),
    "moments, bridge": predicts("moments", link="bridge"),
    "regression": regresses,
    "tuning": tunes,
    "faithful": searches_faithfully,
    "evaluation": evaluates,
    "file": stores,
    "metrics": scores,
}


def assert_same(found: Any, expected: Any, where: str, exact: bool = True) -> None:
    if isinstance(expected, Tensor):
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
        torch.testing.assert_close(
            found.cpu(), expected, equal_nan=True, msg=lambda m: f"{where}: {m}", **tolerance
        )
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}, {name}", exact)
    elif isinstance(expected, list):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}, {index}", exact)
    elif isinstance(expected, float):
        assert found == (expected if exact else pytest.approx(expected, rel=1e-4, nan_ok=True)), where
    elif "seconds" not in where:
        assert found == expected, where


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", WORKS)
def test_torchs_default_device_changes_nothing(name: str) -> None:
    """Tensors of the default device ``meta`` have no numbers: nothing may be computed with one."""
    expected = WORKS[name]()
    normals.cache_clear()
    with torch.device("meta"):
        found = WORKS[name]()
    assert_same(found, expected, name)
