"""Every statistic of every kind of layer against per-sample gradients of plain autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from brute_force import PerSample, Watched, class_losses, class_probabilities, one_hot, per_sample, watch
from torch import Tensor, nn

import posthoc_uq as uq

CLASSES, SAMPLES = 3, 9
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


class Net(nn.Module):
    """A first layer, the layer under test, and a readout: curvature flows through all three."""

    def __init__(self, first: nn.Module, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.layer, self.readout = first, layer, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(torch.tanh(self.first(x))))
        return self.readout(hidden.flatten(2).mean(2) if hidden.ndim > 2 else hidden)

    def watched(self) -> dict[str, Watched]:
        return {"layer": watch(self.layer), "first": watch(self.first)}


class Tokens(nn.Module):
    """Token sequences (batch, tokens, channels) through one Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.readout = nn.Linear(4, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.layer(x)).mean(1))

    def watched(self) -> dict[str, Watched]:
        return {"layer": watch(self.layer), "readout": watch(self.readout)}


class Shared(nn.Module):
    """One module called twice in a forward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.readout = layer, nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(torch.tanh(self.layer(x))))
        return self.readout(hidden.flatten(2).mean(2) if hidden.ndim > 2 else hidden)

    def watched(self) -> dict[str, Watched]:
        return {"layer": watch(self.layer), "readout": watch(self.readout)}


class Tied(nn.Module):
    """Two modules that hold the same weight and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other, self.readout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
        self.other.weight, self.other.bias = self.layer.weight, self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.other(torch.tanh(self.layer(x)))))

    def watched(self) -> dict[str, Watched]:
        sites = [(self.layer, self.layer), (self.other, self.other)]
        return {"layer": Watched(self.layer.weight, self.layer.bias, sites)}


class Functional(nn.Module):
    """A weight used through `F.linear`, never by its module's forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.readout = nn.Linear(4, 4), nn.Linear(4, CLASSES)
        self.before, self.after = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.after(F.linear(self.before(x), self.layer.weight, self.layer.bias))
        return self.readout(torch.tanh(hidden))

    def watched(self) -> dict[str, Watched]:
        return {"layer": Watched(self.layer.weight, self.layer.bias, [(self.before, self.after)])}


def _conv(dims: int, **options: object) -> Callable[[], tuple[nn.Module, tuple[int, ...]]]:
    def build() -> tuple[nn.Module, tuple[int, ...]]:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        size = (9, 5, 4)[dims - 1]
        settings = {"kernel_size": (3, 3, 2)[dims - 1]} | options
        return Net(kind(2, 4, 1), kind(4, 4, **settings), 4), (2, *[size] * dims)

    return build


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "linear": lambda: (Net(nn.Linear(4, 5), nn.Linear(5, 4), 4), (4,)),
    "linear without bias": lambda: (Net(nn.Linear(4, 5, bias=False), nn.Linear(5, 4, bias=False), 4), (4,)),
    "tokens": lambda: (Tokens(), (5, 4)),
    "many tokens": lambda: (Tokens(), (13, 4)),
    "two tokens": lambda: (Tokens(), (2, 4)),
    "shared linear": lambda: (Shared(nn.Linear(4, 4)), (4,)),
    "shared convolution": lambda: (Shared(nn.Conv2d(4, 4, 3, padding=1)), (4, 4, 4)),
    "tied": lambda: (Tied(), (4,)),
    "functional": lambda: (Functional(), (4,)),
    "conv1d": _conv(1, stride=2, padding=1),
    "conv1d same, dilated, no bias": _conv(1, padding="same", dilation=2, bias=False),
    "conv1d groups, circular": _conv(1, groups=2, padding=2, padding_mode="circular"),
    "conv2d": _conv(2),
    "conv2d stride and padding": _conv(2, stride=(2, 1), padding=(1, 2)),
    "conv2d same, even kernel": _conv(2, kernel_size=(2, 4), padding="same"),
    "conv2d dilation": _conv(2, dilation=2, padding=1),
    "conv2d groups": _conv(2, groups=2, stride=2),
    "conv2d depthwise, no bias": _conv(2, groups=4, padding=1, bias=False),
    "conv2d circular": _conv(2, padding=1, padding_mode="circular"),
    "conv2d reflect": _conv(2, padding=(2, 1), padding_mode="reflect", stride=2),
    "conv2d replicate, same": _conv(2, padding="same", padding_mode="replicate"),
    "conv3d": _conv(3, padding=1, stride=2),
    "conv3d groups, dilation": _conv(3, groups=2, dilation=2),
}


def _data(shape: tuple[int, ...], samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (samples,), generator=generator)


def _batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def _fit(model: nn.Module, data: list, method: str, **options: object) -> uq.Posterior:
    options = {"dtype": torch.float64, "prior_precision": 1.0, "progress": False, "fisher": "exact"} | options
    return uq.fit(model, data, method=method, **options)


def _model(case: str, samples: int = SAMPLES) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, shape = CASES[case]()
    return model.double().eval(), *_data(shape, samples)


def _unpacked(basis: Tensor, values: Tensor) -> Tensor:
    identity = torch.eye(basis.shape[-1], dtype=basis.dtype).expand_as(basis)
    torch.testing.assert_close(basis.transpose(1, 2) @ basis, identity, rtol=0, atol=1e-10)
    assert bool((values[:, 1:] <= values[:, :-1]).all())
    return basis * values.unsqueeze(1) @ basis.transpose(1, 2)


def _check_all(
    model: nn.Module, data: list, truth: dict[str, PerSample], weights: Tensor, **options: object
) -> None:
    """Grams, eigenbases, eigenvalues, diagonals and the joint Fisher of every watched layer."""
    kfac, efb = _fit(model, data, "kfac", **options), _fit(model, data, "efb", **options)
    inf = _fit(model, data, "inf", rank=10**6, basis="exact", **options)
    diag = _fit(model, data, "diag", **options)
    for name, expected in truth.items():
        block = kfac.blocks[name]
        several = expected.activations[0].shape[1] > 1
        assert block.factors_of == ("gradients" if several else "rows")
        grams = (
            expected.gradient_factors(weights)
            if several
            else (expected.input_gram(), expected.gradient_gram(weights))
        )
        torch.testing.assert_close(_unpacked(block.input_basis, block.input_eigenvalues), grams[0], **TIGHT)
        torch.testing.assert_close(_unpacked(block.output_basis, block.output_eigenvalues), grams[1], **TIGHT)
        for found in (efb.blocks[name], inf.blocks[name]):
            reference = expected.eigenvalues(weights, found.input_basis, found.output_basis)
            torch.testing.assert_close(found.eigenvalues, reference, **TIGHT)
        torch.testing.assert_close(diag.blocks[name].diagonal, expected.diagonal(weights), **TIGHT)
        torch.testing.assert_close(inf.blocks[name].diagonal, expected.diagonal(weights), **TIGHT)
    full = _fit(model, data, "full", layers=list(truth), **options)
    rows = torch.cat([truth[name].rows() for name in full.layers], dim=2)
    joint = torch.einsum("sk,ski,skj->ij", weights, rows, rows) / rows.shape[0]
    torch.testing.assert_close(full.blocks["joint"].fisher, joint, **TIGHT)


ALSO_EMPIRICAL = (
    "linear",
    "tokens",
    "shared convolution",
    "tied",
    "functional",
    "conv1d groups, circular",
    "conv2d",
    "conv2d depthwise, no bias",
    "conv3d groups, dilation",
)
"""One of every engine: how a layer's rows are cut out does not depend on the labels."""


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    ("case", "fisher"),
    [(case, "exact") for case in CASES]
    + [
        pytest.param(case, "empirical", marks=[pytest.mark.study] * (case not in ALSO_EMPIRICAL))
        for case in CASES
    ],
)
def test_every_statistic_equals_brute_force(case: str, fisher: str) -> None:
    model, x, y = _model(case)
    truth = {name: per_sample(model, watched, x, class_losses) for name, watched in model.watched().items()}
    weights = class_probabilities(model, x) if fisher == "exact" else one_hot(y, CLASSES)
    _check_all(model, _batches(x, y, 7), truth, weights, fisher=fisher)


class Averaged(nn.Module):
    """A linear layer of tokens, or a convolution, whose outputs are averaged over the positions."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y.flatten(2).mean(2) if isinstance(self.layer, nn.Conv2d) else y.mean(1)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv2d(2, 3, 3), (2, 6, 5)), (nn.Linear(4, 3), (7, 4)), (nn.Linear(4, 3), (1, 4))],
    ids=["convolution", "tokens", "one token"],
)
def test_kronecker_factors_are_exact_where_positions_are_averaged(
    layer: nn.Module, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """The Fisher of a mean under Gaussian noise is the Kronecker product of that of the mean input and the identity;
    products of single positions have a trace far below its. Data come in and go out of it, also of its file.
    """
    torch.manual_seed(0)
    model = Averaged(layer).double().eval()
    x, _ = _data(shape, 30)
    x, y = x + 1, torch.zeros(30, 3, dtype=torch.float64)
    options = {"likelihood": "regression", "noise_variance": 0.5}
    with torch.no_grad():
        columns = F.unfold(x, 3).transpose(1, 2) if len(shape) == 3 else x
        mean = torch.cat([columns.mean(1), torch.ones(30, 1, dtype=torch.float64)], 1)
    for count in (20, 30):
        data = _batches(x[:count], y[:count], 8)
        posterior = _fit(model, data, "kfac", keep_grams=True, **options)
        block = posterior.blocks["layer"]
        assert block.factors_of == "gradients"
        gram = mean[:count].T @ mean[:count] / count / 0.5
        expected = torch.kron(torch.eye(3, dtype=torch.float64), gram)
        torch.testing.assert_close(block.dense()[0], expected, **TIGHT)
    uq.save(posterior, tmp_path / "averaged.h5")
    loaded = uq.load(tmp_path / "averaged.h5", model)
    assert loaded.blocks["layer"].factors_of == "gradients"
    fewer = uq.update(loaded, _batches(x[20:], y[20:], 3), remove=True, progress=False)
    again = uq.update(fewer, _batches(x[20:], y[20:], 3), progress=False)
    gram = mean[:20].T @ mean[:20] / 20 / 0.5
    for found, expected in ((fewer, torch.kron(torch.eye(3).double(), gram)), (again, block.dense()[0])):
        torch.testing.assert_close(found.blocks["layer"].dense()[0], expected, rtol=1e-8, atol=1e-10)
        assert found.blocks["layer"].factors_of == "gradients"


class Steps(nn.Module):
    """A recurrent layer, or a linear one of flattened tokens, with a readout of the last step or of their mean."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.layer = nn.RNN(3, 4, batch_first=True) if recurrent else nn.Linear(3, 4)
        self.readout = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.RNN):
            return self.readout(self.layer(x)[0][:, -1])
        tokens = torch.tanh(self.layer(x.flatten(0, 1)))
        return self.readout(tokens.unflatten(0, x.shape[:2]).mean(1))


@pytest.mark.parametrize("recurrent", [False, True])
def test_factors_are_of_gradients_where_a_later_batch_has_more_positions(recurrent: bool) -> None:
    """The first batch has one step a sample, which shows no positions; the trace is that of the Fisher all the same."""
    torch.manual_seed(0)
    model = Steps(recurrent).double().eval()
    data = [
        (torch.randn(6, steps, 3, dtype=torch.float64), torch.zeros(6, dtype=torch.long))
        for steps in (1, 4, 1, 3)
    ]
    kfac, efb, diagonal = (_fit(model, data, method) for method in ("kfac", "efb", "diag"))
    for name in set(kfac.layers) - {"readout"}:
        trace = diagonal.blocks[name].dense().diagonal(dim1=-2, dim2=-1).sum()
        for posterior in (kfac, efb):
            found = posterior.blocks[name].dense().diagonal(dim1=-2, dim2=-1).sum()
            torch.testing.assert_close(found, trace, **TIGHT)
        assert kfac.blocks[name].factors_of == "gradients"
    order = [data[1], *data[:1], *data[2:]]
    for name, block in _fit(model, order, "kfac").blocks.items():
        torch.testing.assert_close(block.dense(), kfac.blocks[name].dense(), **TIGHT)
    with pytest.raises(uq.PosthocUQError, match="read only once"):
        _fit(model, iter(data), "kfac")  # type: ignore[arg-type]


@pytest.mark.parametrize("fisher", ["exact", "empirical", "mc"])
@pytest.mark.parametrize("case", ["tokens", "shared convolution", "conv2d groups"])
@pytest.mark.covering(1)
def test_batch_size_and_order_do_not_matter(case: str, fisher: str) -> None:
    model, x, y = _model(case, 33)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(5))
    whole = _fit(model, _batches(x, y, 32), "full", fisher=fisher).blocks["joint"].fisher
    grams = _fit(model, _batches(x, y, 32), "kfac", fisher=fisher)
    for data in (_batches(x, y, 1), _batches(x, y, 7), _batches(x[order], y[order], 7)):
        torch.testing.assert_close(
            _fit(model, data, "full", fisher=fisher).blocks["joint"].fisher, whole, **TIGHT
        )
        other = _fit(model, data, "kfac", fisher=fisher)
        for name, block in grams.blocks.items():
            torch.testing.assert_close(other.blocks[name].dense(), block.dense(), **TIGHT)
