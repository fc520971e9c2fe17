"""Recurrent layers: opened up they are torch's own, and their posteriors agree with autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

import posthoc_uq as uq
from posthoc_uq.layers import CallWatcher

KINDS: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM,
    "projected": lambda *args, **kwargs: nn.LSTM(*args, proj_size=3, **kwargs),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
SAMPLES, STEPS = 12, 5


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _opened(module: nn.Module, *args: Any) -> tuple[list[Tensor], int]:
    calls: list[Any] = []
    with CallWatcher(None, lambda call, output: calls.append(call), anchored=False):
        found = module(*args)
    return tree_leaves(found), len(calls)


@pytest.mark.parametrize("kind", KINDS)
def test_an_opened_layer_is_torchs_own(kind: str) -> None:
    torch.manual_seed(0)
    for layers, bias, both, first in product((1, 2), (True, False), (True, False), (True, False)):
        module = KINDS[kind](4, 5, layers, bias=bias, bidirectional=both, batch_first=first).double()
        state = tree_leaves(module(_x(3, 3, 4))[1])
        initial = tuple(torch.randn_like(part) for part in state)
        given: list[tuple[Any, ...]] = [(), (initial if len(initial) > 1 else initial[0],)]
        for args in given:
            expected = tree_leaves(module(_x(3, 3, 4), *args))
            found, calls = _opened(module, _x(3, 3, 4), *args)
            assert calls == layers * (1 + both) * (1 + 3 * (1 + (kind == "projected")))
            torch.testing.assert_close(found, expected)
        gradients = [
            torch.autograd.grad(outputs[0].square().sum(), list(module.parameters()))
            for outputs in (tree_leaves(module(_x(3, 3, 4))), _opened(module, _x(3, 3, 4))[0])
        ]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_an_opened_cell_is_torchs_own(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind(4, 5).double()
    found, calls = _opened(module, _x(3, 4))
    torch.testing.assert_close(found, tree_leaves(module(_x(3, 4))))
    assert calls == 2


class Classifier(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = KINDS[kind](3, 4, batch_first=True, **options)
        self.readout = nn.Linear(8 if options.get("bidirectional") else 3 if kind == "projected" else 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.inner(x)[0][:, -1])


def _fit(model: nn.Module, method: str, **options: Any) -> uq.Posterior:
    data = [(_x(SAMPLES, STEPS, 3), torch.arange(SAMPLES) % 3)]
    return uq.fit(model, data, method, prior_precision=1.0, fisher="exact", progress=False, **options)


def _jacobians(model: nn.Module, x: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Of each sample's logits, by autograd: ``(samples, classes, *shape)``."""
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    weights = dict(model.named_parameters())
    for sample in x.split(1):
        logits = model(sample)[0]
        each = [
            torch.autograd.grad(logit, [weights[n] for n in names], retain_graph=True) for logit in logits
        ]
        for place, name in enumerate(names):
            rows[name].append(torch.stack([gradients[place] for gradients in each]))
    return {name: torch.stack(parts) for name, parts in rows.items()}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("lstm", {}), ("projected", {}), ("gru", {"bidirectional": True}), ("tanh", {"num_layers": 2})],
)
def test_diagonals_and_predictions_agree_with_autograd(kind: str, options: dict[str, Any]) -> None:
    model = Classifier(kind, **options).double().eval()
    posterior = _fit(model, "diag")
    names = [name for name, _ in model.named_parameters()]
    assert set(posterior.mean) == set(names)  # every weight and bias
    x = _x(SAMPLES, STEPS, 3)
    jacobians = _jacobians(model, x, names)
    probs = model(x).softmax(1).detach()
    hessian = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    variance = 0.0
    for name in names:
        jacobian = jacobians[name].flatten(2)
        precision = torch.einsum("scp,scd,sdp->p", jacobian, hessian, jacobian) + 1.0
        torch.testing.assert_close(posterior.variance()[name].flatten(), 1 / precision)
        variance = variance + torch.einsum("scp,p->sc", jacobian.square(), 1 / precision)
    found = uq.wrap(model, posterior)(x)
    assert isinstance(found, uq.ClassPrediction)
    torch.testing.assert_close(found.logits_variance, variance)


@pytest.mark.parametrize("method", ["inf", "kfac", "efb"])
def test_every_head_predicts_and_a_file_keeps_it(method: str, tmp_path: Path) -> None:
    model = Classifier("lstm").eval()
    data = [(_x(SAMPLES, STEPS, 3).float(), torch.arange(SAMPLES) % 3)]
    posterior = uq.fit(model, data, method, prior_precision=100.0, progress=False)
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model)
    heads: dict[str, dict[str, Any]] = {
        "linearized": {},
        "sampling": {"n_samples": 2000, "seed": 0},
        "moments": {},
    }
    x = data[0][0]
    variances = {}
    for head, options in heads.items():
        variances[head] = uq.wrap(model, posterior, head, **options)(x).logits_variance
        few = options | ({"n_samples": 8} if options else {})
        found, again = (uq.wrap(model, own, head, **few)(x).logits_variance for own in (posterior, loaded))
        torch.testing.assert_close(again, found)
    # near the trained weights the network is linear in them
    torch.testing.assert_close(variances["sampling"], variances["linearized"], rtol=0.25, atol=1e-3)
    assert 0.3 < float((variances["moments"] / variances["linearized"]).mean()) < 3


def test_a_tagger_fits_at_first_try() -> None:
    """Labels of every step say that the classes are the last dimension of the outputs."""

    class Tagger(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return self.readout(self.inner(x)[0])

    model = Tagger("lstm").eval()
    x, y = _x(SAMPLES, STEPS, 3).float(), torch.arange(SAMPLES * STEPS).reshape(SAMPLES, STEPS) % 3
    posterior = uq.fit(model, [(x, y)], progress=False)
    assert posterior.likelihood.layout.class_dim == -1  # type: ignore[attr-defined]
    assert uq.wrap(model, posterior)(x).probs.shape == (SAMPLES, STEPS, 3)  # type: ignore[attr-defined]
    # where they would fit both dimensions, it is the usual one
    square = uq.fit(model, [(x[:, :3], y[:, :3])], "diag", prior_precision=1.0, progress=False)
    assert square.likelihood.layout.class_dim == 1  # type: ignore[attr-defined]


class Packed(Classifier):
    """Sequences of several lengths, read from their ends and from all of their steps."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        steps, state = self.inner(packed)
        # without a length the mean would depend on the longest sequence of a batch
        whole, _ = pad_packed_sequence(steps, batch_first=True, padding_value=0.25, total_length=STEPS)
        last = state[0][-1] if isinstance(state, tuple) else state[-1]
        return self.readout(whole.mean(1) * 0.1 + whole[:, 0]) + last[:, :3]


LENGTHS = torch.tensor([3, 5, 1, 2, 5, 5, 1, 3, 2, 4, 5, 2])


@pytest.mark.parametrize(
    ("kind", "options"),
    [("lstm", {}), ("projected", {}), ("gru", {"bidirectional": True}), ("tanh", {"num_layers": 2})],
)
def test_packed_sequences_run_step_by_step(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A dense posterior equals the definition; every weight is caught, by its calls."""
    model = Packed(kind, **options).double().eval()
    x, y = _x(SAMPLES, STEPS, 3), torch.arange(SAMPLES) % 3
    data = [((x[rows], LENGTHS[rows]), y[rows]) for rows in torch.arange(SAMPLES).split(5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = uq.fit(model, data, "full", prior_precision=2.0, fisher="exact", progress=False)
    names = [name for name, _ in model.named_parameters()]
    assert set(posterior.mean) == set(names)
    assert {layer.kind for layer in posterior.layers.values()} == {"linear"}
    outputs = model(x, LENGTHS)
    weights = [model.get_parameter(name) for name in names]
    rows = [torch.autograd.grad(out, weights, retain_graph=True) for row in outputs for out in row]
    j = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    p = outputs.detach().softmax(1)
    inner = torch.block_diag(*(p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)))
    precision = j.T @ inner @ j + 2.0 * torch.eye(j.shape[1], dtype=torch.float64)
    expected = j @ torch.linalg.solve(precision, j.T)
    found = uq.wrap(model, posterior).functional_covariance(x, LENGTHS, joint=True)  # type: ignore[attr-defined]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("by_name", [False, True])
def test_every_head_takes_packed_sequences(by_name: bool) -> None:
    """A sequence in a packed batch, given by place or by name, has the moments and draws of the plain layer on it
    alone, under the same posterior.
    """

    class Ends(Classifier):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            return self.readout((self.inner(input=packed) if by_name else self.inner(packed))[1][0][-1])

    plain, packed = Classifier("lstm").double().eval(), Ends("lstm").double().eval()
    x, y = _x(SAMPLES, STEPS, 3), torch.arange(SAMPLES) % 3
    posterior = uq.fit(packed, [((x, LENGTHS), y)], "diag", prior_precision=5.0, progress=False)
    assert {layer.kind for layer in posterior.layers.values()} == {"linear"}
    heads: dict[str, dict[str, Any]] = {
        "linearized": {},
        "linearized by draws": {"engine": "jvp", "n_probes": 4},
        "sampling": {"seed": 0},
        "moments": {},
    }
    for head, options in heads.items():
        of_all, of_one = (uq.wrap(model, posterior, head.split()[0], **options) for model in (packed, plain))
        alone = [of_one(x[i : i + 1, :steps]).logits_variance for i, steps in enumerate(LENGTHS.tolist())]
        torch.testing.assert_close(of_all(x, LENGTHS).logits_variance, torch.cat(alone), msg=head)


def test_packed_batches_are_refused_with_the_way_out() -> None:
    class OfPacked(Classifier):
        def forward(self, packed: PackedSequence) -> Tensor:
            return self.readout(self.inner(packed)[1][0][-1])

    lengths = torch.full((SAMPLES,), STEPS)
    packed = pack_padded_sequence(_x(SAMPLES, STEPS, 3).float(), lengths, batch_first=True)
    for options in ({}, {"batch_to_inputs": lambda batch: (batch[0],)}):
        with pytest.raises(uq.PosthocUQError, match=r"PackedSequence.*\(padded, lengths\), targets\)"):
            data = [(packed, torch.arange(SAMPLES) % 3)]
            uq.fit(OfPacked("lstm").eval(), data, "diag", prior_precision=1.0, progress=False, **options)


def test_a_trainings_warning_names_a_layer_whose_steps_cannot_be_followed() -> None:
    class Direct(Classifier):
        """Calls torch's function itself, which does not say whose rows these are."""

        def forward(self, x: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, torch.full((len(x),), STEPS), batch_first=True)
            state = x.new_zeros(1, len(x), 4)
            weights = list(self.inner.parameters())
            options = True, 1, 0.0, False, False  # biases, layers, dropout, training, both directions
            return self.readout(torch.gru(packed.data, packed.batch_sizes, state, weights, *options)[1][0])

    model, data = Direct("gru").double().eval(), [(_x(SAMPLES, STEPS, 3), torch.arange(SAMPLES) % 3)]
    options: dict[str, Any] = {"method": "utvi", "epochs": 1, "progress": False}
    with pytest.warns(UserWarning, match=r"Weights without a posterior, \d+% of all weights: 'inner\.weight"):
        posterior = uq.fit(model, data, **options)
    assert list(posterior.layers) == ["readout"]
    with pytest.raises(uq.UnsupportedLayerError, match=r"'inner': its steps cannot be followed"):
        uq.fit(model, data, unsupported="raise", **options)
