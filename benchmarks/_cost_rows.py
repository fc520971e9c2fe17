"""The rows of the table of costs (`between_commits.py --table`). Each calls only what `posthoc_uq` exports, so that it
runs at earlier commits too.

Processor time on one thread. A pass is a plain forward and backward pass over the same data, both measured before and
after what is counted in them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _cases import WORDS, Texts, lenet, of_timm, of_torchvision, settle_batchnorm
from _harness import MIB, forget_peak, held_memory, multiple, peak_memory, processor_seconds
from torch import Tensor, nn

Found = dict[str, float]
Batches = list[tuple[Tensor, Tensor]]
CLASSES = 10


class CostRow(NamedTuple):
    """Lines of the table that are measured in one process.

    Attributes:
        measure: gives what each of them costs.
        unit: of these numbers.
        goals: of those that have one.
        rounds: at most, fewer for the expensive ones.
        limit: seconds after which it is given up.
    """

    measure: Callable[[], Found]
    unit: str
    goals: dict[str, float]
    rounds: int = 5
    limit: int = 400


def perceptron(*sizes: int) -> nn.Module:
    """With ReLU between its layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def batched(inputs: Tensor, classes: int = CLASSES, size: int = 64) -> Batches:
    """Inputs with labels of all classes in turn."""
    return list(zip(inputs.split(size), (torch.arange(len(inputs)) % classes).split(size), strict=True))


def plain(model: nn.Module, batches: Batches) -> None:
    """Forth and back."""
    for x, y in batches:
        nn.functional.cross_entropy(model(x), y).backward()
    model.zero_grad(set_to_none=True)


def forward(predict: Callable[[Tensor], Any], batches: Batches) -> None:
    """Of all inputs; copies, since of the last inputs a prediction is kept."""
    with torch.no_grad():
        for x, _ in batches:
            predict(x.clone())


def fit(model: nn.Module, batches: Batches, *arguments: Any, **options: Any) -> Any:
    """By the version of the package that this process has."""
    import posthoc_uq as uq

    return uq.fit(model, batches, *arguments, progress=False, **options)


def predictor_of(model: nn.Module, posterior: Any) -> Callable[[Tensor], Tensor]:
    """Probabilities by the linearised head."""
    import posthoc_uq as uq

    wrapped = uq.wrap(model, posterior, "linearized")
    return lambda x: wrapped(x).probs


def _vit() -> nn.Module:
    return of_timm("vit_tiny_patch16_224", img_size=64, num_classes=CLASSES)


def _resnet() -> nn.Module:
    return of_torchvision("resnet18", num_classes=CLASSES)


def _mobilenet() -> nn.Module:
    return of_torchvision("mobilenet_v3_small", num_classes=CLASSES)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LeNet": (lenet, (1, 28, 28)),
    "ResNet-18, 32 px": (_resnet, (3, 32, 32)),
    "ResNet-18, 64 px": (_resnet, (3, 64, 64)),
    "ResNet-18, 224 px": (_resnet, (3, 224, 224)),
    "mobilenet, 64 px": (_mobilenet, (3, 64, 64)),
    "vit_tiny, 64 px": (_vit, (3, 64, 64)),
    "DistilBERT": (partial(Texts, CLASSES), (24,)),
}


def network(name: str, count: int, size: int = 64) -> tuple[nn.Module, Batches]:
    """One of `NETWORKS` with random weights, and random inputs."""
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = build().eval()
    if len(shape) == 1:
        return model, batched(torch.randint(1, WORDS, (count, *shape)), size=size)
    inputs = torch.rand(count, *shape)
    settle_batchnorm(model, inputs[:64])
    return model, batched(inputs, size=size)


# Predictions


def small_predictions() -> Found:
    """Ten rows by a small perceptron, milliseconds."""
    found = Found()
    for classes, method in ((2, "kfac"), (10, "inf")):
        torch.manual_seed(0)
        model, batches = perceptron(8, 16, classes), batched(torch.randn(300, 8), classes)
        predict = predictor_of(model, fit(model, batches, method, layers="last", prior_precision=1.0))
        x = [torch.randn(10, 8) for _ in range(300)]
        times = [processor_seconds(partial(predict, each)) for each in x]
        found[f"10 rows, last layer, {classes} classes"] = 1e3 * median(times)
    return found


def all_layers(name: str, rows: int = 64) -> Found:
    """A later prediction by INF over all layers, and what the first takes more, in forward passes of the same rows."""
    model, batches = network(name, 64, 8 if name == "vit_tiny, 64 px" else 64)
    predict = predictor_of(model, fit(model, batches, "inf", layers="all", prior_precision=1e4))
    x = batched(torch.cat([x for x, _ in batches])[:rows])
    first = processor_seconds(lambda: forward(predict, x))
    later = multiple(lambda: forward(model, x), lambda: forward(predict, x), 2)
    found = {f"all layers, {name}": later}
    if name == "vit_tiny, 64 px":
        unit = min(processor_seconds(lambda: forward(model, x)) for _ in range(3))
        found["first prediction less a later one, vit_tiny"] = first / unit - later
    return found


def table_rows() -> Found:
    """16,384 rows by all layers of a small network, microseconds a row."""
    torch.manual_seed(0)
    model = perceptron(10, 32, 32, CLASSES)
    posterior = fit(model, batched(torch.randn(256, 10)), "inf", layers="all", prior_precision=1.0)
    predict, x = predictor_of(model, posterior), torch.randn(16_384, 10)
    predict(x[:64])
    times = [processor_seconds(lambda: predict(x.clone())) for _ in range(3)]
    return {"16,384 rows of a table, all layers": 1e6 * median(times) / len(x)}


def peak(name: str) -> Found:
    """What a prediction of 32 images holds above the weights, MB."""
    model, batches = network(name, 64, 8)
    predict = predictor_of(model, fit(model, batches, "inf", layers="all", prior_precision=1e4))
    x = torch.cat([x for x, _ in batches])[:32]
    predict(x.clone())
    forget_peak()
    before = held_memory()
    predict(x.clone())
    return {f"peak of 32 images, {name}": (peak_memory() - before) / MIB}


def links(classes: int) -> Found:
    """A whole prediction of 64 rows by the last layer, microseconds a row, at the default fit's prior."""
    import posthoc_uq as uq

    torch.manual_seed(0)
    centres = torch.randn(classes, 32)
    labels = torch.randint(0, classes, (4000,))
    inputs = centres[labels] + 0.8 * torch.randn(len(labels), 32)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, classes))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(300):
        batch = torch.randint(0, len(inputs), (256,))
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimiser.step()
    model.eval()
    batches = list(zip(inputs[:1000].split(250), labels[:1000].split(250), strict=True))
    posterior, x = fit(model, batches, "kfac", layers="last"), inputs[-64:]
    found = Found()
    for link in ("mc", "probit"):
        predict = uq.wrap(model, posterior, "linearized", link=link)
        _ = predict(x.clone()).probs
        times = [processor_seconds(lambda predict=predict: predict(x.clone()).probs) for _ in range(7)]
        found[f"{link} link, {classes:,} classes"] = 1e6 * median(times) / len(x)
    return found


# Fits and searches


def default_of_classes(classes: int) -> Found:
    """A default fit of a last layer over one at a given prior, by KFAC; of 12,000 classes also a prediction of 16."""
    torch.manual_seed(0)
    model = perceptron(32, 64, classes)
    inputs, labels = torch.randn(256, 32), torch.randint(classes, (256,))
    batches = list(zip(inputs.split(64), labels.split(64), strict=True))
    given = min(
        processor_seconds(lambda: fit(model, batches, "kfac", layers="last", prior_precision=1.0))
        for _ in range(2)  # the first imports what is needed
    )
    kept = list[Any]()
    whole = processor_seconds(lambda: kept.append(fit(model, batches, "kfac", layers="last")))
    found = {f"default fit over a given prior's, {classes:,} classes": whole / given}
    if classes > 2000:
        predict, x = predictor_of(model, kept[0]), torch.randn(16, 32)
        predict(x)
        found[f"16 rows of {classes:,} classes, seconds"] = processor_seconds(lambda: predict(x.clone()))
    return found


def of_table() -> Found:
    """A perceptron on 1,000 rows: a default fit, in passes, and `calibrate`, in forward passes of these rows."""
    import posthoc_uq as uq

    torch.manual_seed(0)
    model = perceptron(16, 64, 64, 4)
    x = torch.randn(1000, 16)
    batches = list(zip(x.split(64), x[:, :4].argmax(1).split(64), strict=True))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(20):
        for inputs, labels in batches:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimiser.step()
    held_out = list(zip(torch.randn(1000, 16).split(64), torch.randint(4, (1000,)).split(64), strict=True))
    held_out = [(a, a[:, :4].argmax(1)) for a, _ in held_out]
    fitted = multiple(lambda: plain(model, batches), lambda: fit(model, batches), 3)
    posterior = fit(model, batches)
    calibrate = partial(uq.calibrate, posterior, held_out, progress=False)
    return {
        "default fit, MLP, 1,000 rows": fitted,
        "calibrate, MLP, 1,000 rows": multiple(lambda: forward(model, held_out), calibrate, 1),
    }


def calibrate_lenet() -> Found:
    """`calibrate` with 1,000 images by a LeNet, in forward passes of these."""
    import posthoc_uq as uq

    model, batches = network("LeNet", 1000)
    posterior = fit(model, batches[:4], layers="all")
    calibrate = partial(uq.calibrate, posterior, batches, progress=False)
    taken = processor_seconds(calibrate)
    units = [processor_seconds(lambda: forward(model, batches)) for _ in range(3)]
    return {"calibrate, LeNet, 1,000 images": taken / median(units)}


def default_fit(name: str, images: int, label: str, size: int = 64) -> Found:
    """In passes over the images. What is imported by a first fit takes up to half a pass, and is not counted."""
    fit(perceptron(4, 8, 2), batched(torch.randn(64, 4), 2), layers="all")
    model, batches = network(name, images, size)
    before = processor_seconds(lambda: plain(model, batches))
    taken = processor_seconds(lambda: fit(model, batches, layers="all"))
    after = processor_seconds(lambda: plain(model, batches))
    return {label: 2 * taken / (before + after)}


def large_images() -> Found:
    """ResNet-18 at 224 px: INF at a given prior with three labels in passes, a default fit in those of one image."""
    model, batches = network("ResNet-18, 224 px", 48, 8)
    labels = {"fisher": "mc", "n_samples": 3}

    def given(some: Batches) -> float:
        return processor_seconds(lambda: fit(model, some, "inf", layers="all", prior_precision=1.0, **labels))

    plain(model, batches[:1])
    unit = processor_seconds(lambda: plain(model, batches))
    few, many = given(batches[:3]), given(batches)
    whole = processor_seconds(lambda: fit(model, batches, layers="all"))
    unit = (unit + processor_seconds(lambda: plain(model, batches))) / 2
    return {
        "INF of three labels, ResNet-18, 224 px, a further pass": 2 * (many - few) / unit,
        "default fit, ResNet-18, 224 px, 48 images": 48 * whole / unit,
    }


def search(name: str, images: int) -> Found:
    """What a default fit takes longer than one with a given prior, in plain passes of one input."""
    model, batches = network(name, images, 16 if "224" in name else 64)
    plain(model, batches)
    before, kept = processor_seconds(lambda: plain(model, batches)), list[Any]()
    whole = processor_seconds(lambda: kept.append(fit(model, batches, layers="all")))
    facts = kept[0].history.fit
    labels = {"fisher": facts["fisher"], "n_samples": facts.get("labels drawn per sample", 1)}
    if labels["fisher"] == "exact":
        del labels["n_samples"]
    sweeps = processor_seconds(lambda: fit(model, batches, layers="all", prior_precision=1.0, **labels))
    unit = (before + processor_seconds(lambda: plain(model, batches))) / 2 / images
    return {f"search of the prior, {name}, {images} images": (whole - sweeps) / unit}


# A server


def serving() -> Found:
    """The server's processor time for a request of 64 clients, milliseconds, and requests a second of one processor."""
    import json
    import subprocess

    import psutil
    import serve_load

    import posthoc_uq as uq

    with tempfile.TemporaryDirectory() as place:
        folder, names = Path(place), dict[str, Any]()
        (folder / "served.py").write_text(serve_load.MODEL)
        exec(serve_load.MODEL, names)
        torch.manual_seed(0)
        model, images = names["small"]().eval(), torch.rand(32, 3, 12, 12)
        batches = [(images, torch.randint(5, (32,)))]
        posterior = fit(model, batches, layers="last", prior_precision=1.0)
        calibrated = uq.calibrate(posterior, batches, share=None, progress=False)
        uq.save(calibrated if isinstance(calibrated, uq.Posterior) else posterior, folder / "m.h5")
        torch.save(model.state_dict(), folder / "w.pt")
        arguments = ["serve", str(folder / "m.h5"), "--model", f"{folder / 'served.py'}:small"]
        arguments += ["--weights", str(folder / "w.pt"), "--port", "0", "--json"]
        bodies = [json.dumps({"input": torch.rand(3, 12, 12).tolist()}).encode() for _ in range(16)]
        requests = [("/predict", body, serve_load.JSON, {}) for body in bodies]
        command = [sys.executable, "-m", "posthoc_uq", *arguments]
        # in the folder of the files: in that of the project Python would take the package from there
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as server:
            try:
                assert server.stdout is not None
                load = serve_load.Load(json.loads(server.stdout.readline())["url"], requests)
                load.run(64, 300)
                process = psutil.Process(server.pid)
                worked = -sum(process.cpu_times()[:2])
                load.run(64, 3000)
                worked += sum(process.cpu_times()[:2])
            finally:
                server.terminate()
    return {"serve, 64 clients, requests per second of a processor": 3000 / worked}


# Beside laplace-torch, where this environment has it


def _laplace(model: nn.Module, batches: Batches, **options: Any) -> Any:
    from laplace import Laplace

    data = torch.utils.data.TensorDataset(*(torch.cat(each) for each in zip(*batches, strict=True)))
    made = Laplace(model, "classification", **options)
    made.fit(torch.utils.data.DataLoader(data, batch_size=64))
    return made


def draws() -> Found:
    """5,000 draws of the 603 weights of a perceptron, over those of laplace-torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 3)).eval()
    batches, found = batched(torch.randn(300, 8), 3), Found()
    for method, structure in (("kfac", "kron"), ("diag", "diag"), ("full", "full")):
        posterior = fit(model, batches, method, layers="all", prior_precision=1.0)
        rival = _laplace(model, batches, subset_of_weights="all", hessian_structure=structure)
        ours = partial(posterior.sample, 5000, torch.Generator().manual_seed(1))
        found[f"5,000 draws over laplace-torch's, {method}"] = multiple(
            lambda rival=rival: rival.sample(5000), ours, 5
        )
    return found


def beside_laplace(name: str, layers: str) -> Found:
    """A Kronecker fit at a given prior and a later prediction of 64 rows, over those of laplace-torch."""
    import posthoc_uq as uq

    torch.manual_seed(0)
    if name == "MLP":
        model, batches = perceptron(8, 16, 2), batched(torch.randn(300, 8), 2)
    else:
        model, batches = network(name, 256)
    options = {"subset_of_weights": "last_layer" if layers == "last" else "all", "hessian_structure": "kron"}
    found, what = Found(), f"{name}, {layers}"
    kept, rivals = list[Any](), list[Any]()

    def ours() -> None:
        kept[:] = [fit(model, batches, "kfac", layers=layers, prior_precision=1.0)]

    def theirs() -> None:
        rivals[:] = [_laplace(model, batches, **options)]

    found[f"fit over laplace-torch's, {what}"] = multiple(theirs, ours, 3)
    x = batches[0][0]
    for link in ("probit", "mc"):
        predict = uq.wrap(model, kept[0], "linearized", link=link)
        rival = partial(rivals[0], link_approx=link)
        found[f"prediction over laplace-torch's, {link}, {what}"] = multiple(
            lambda rival=rival: rival(x.clone()), lambda predict=predict: predict(x.clone()).probs, 5
        )
    return found


PASSES, OF_ROWS = "passes", "forward passes"
ROWS: dict[str, CostRow] = {
    "small": CostRow(small_predictions, "ms", {"10 rows, last layer, 2 classes": 0.4}),
    "lenet": CostRow(partial(all_layers, "LeNet"), OF_ROWS, {"all layers, LeNet": 15}),
    "resnet": CostRow(partial(all_layers, "ResNet-18, 32 px"), OF_ROWS, {"all layers, ResNet-18, 32 px": 25}),
    "mobilenet": CostRow(partial(all_layers, "mobilenet, 64 px"), OF_ROWS, {"all layers, mobilenet, 64 px": 35}),
    "vit": CostRow(
        partial(all_layers, "vit_tiny, 64 px", 32),
        OF_ROWS,
        {"all layers, vit_tiny, 64 px": 45, "first prediction less a later one, vit_tiny": 5},
        rounds=3,
    ),
    "distilbert": CostRow(partial(all_layers, "DistilBERT", 32), OF_ROWS, {"all layers, DistilBERT": 18}, rounds=3),
    "rows": CostRow(table_rows, "us a row", {"16,384 rows of a table, all layers": 60}),
    "mc, 10": CostRow(partial(links, 10), "us a row", {"mc link, 10 classes": 40}),
    "mc, 100": CostRow(partial(links, 100), "us a row", {"mc link, 100 classes": 120}),
    "mc, 1,000": CostRow(partial(links, 1000), "us a row", {"mc link, 1,000 classes": 800}, rounds=3),
    **{
        f"{classes:,} classes": CostRow(
            partial(default_of_classes, classes),
            "times",
            {
                f"default fit over a given prior's, {classes:,} classes": 3,
                f"16 rows of {classes:,} classes, seconds": 0.3,
            },
            rounds=3,
            limit=120,
        )
        for classes in (500, 1000, 2000, 12_000)
    },
    "table": CostRow(of_table, PASSES, {"default fit, MLP, 1,000 rows": 60, "calibrate, MLP, 1,000 rows": 300}),
    "calibrate": CostRow(calibrate_lenet, OF_ROWS, {"calibrate, LeNet, 1,000 images": 30}, rounds=3),
    "fit, mobilenet": CostRow(
        partial(default_fit, "mobilenet, 64 px", 128, "default fit, mobilenet, 64 px"),
        PASSES, {"default fit, mobilenet, 64 px": 8}, rounds=3,
    ),
    "fit, resnet": CostRow(
        partial(default_fit, "ResNet-18, 64 px", 256, "default fit, ResNet-18, 64 px"),
        PASSES, {"default fit, ResNet-18, 64 px": 4}, rounds=2,
    ),
    "fit, vit": CostRow(
        partial(default_fit, "vit_tiny, 64 px", 256, "default fit, vit_tiny, 64 px"),
        PASSES, {"default fit, vit_tiny, 64 px": 4}, rounds=2,
    ),
    "search, lenet": CostRow(
        partial(search, "LeNet", 256), "passes of one input", {"search of the prior, LeNet, 256 images": 700}, rounds=3
    ),
    "search, vit": CostRow(
        partial(search, "vit_tiny, 64 px", 16),
        "passes of one input", {"search of the prior, vit_tiny, 64 px, 16 images": 200}, rounds=3,
    ),
    "search, resnet": CostRow(
        partial(search, "ResNet-18, 224 px", 16),
        "passes of one input", {"search of the prior, ResNet-18, 224 px, 16 images": 100}, rounds=2,
    ),
    **{
        f"peak, {name}": CostRow(partial(peak, name), "MB", {f"peak of 32 images, {name}": goal}, rounds=3)
        for name, goal in (("vit_tiny, 64 px", 300), ("ResNet-18, 32 px", 300), ("mobilenet, 64 px", 190))
    },
    "serve": CostRow(serving, "per second", {"serve, 64 clients, requests per second of a processor": 1500}, rounds=3),
    "large images": CostRow(
        large_images,
        PASSES,
        {
            "INF of three labels, ResNet-18, 224 px, a further pass": 2.5,
            "default fit, ResNet-18, 224 px, 48 images": 250,
        },
        rounds=3, limit=900,
    ),
    "draws": CostRow(
        draws, "times", {f"5,000 draws over laplace-torch's, {method}": 1.5 for method in ("kfac", "diag", "full")}
    ),
    **{
        f"laplace, {name}, {layers}": CostRow(partial(beside_laplace, name, layers), "times", {}, rounds=3)
        for name in ("MLP", "LeNet")
        for layers in ("last", "all")
    },
}  # fmt: skip
"""The large ones last; those of laplace-torch need an environment that has it."""
SMOKE: Sequence[str] = ("small", "rows")
