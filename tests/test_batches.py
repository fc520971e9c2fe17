"""Batches of every accepted form, what a model is called with, and what is said where it cannot be run on them."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from small_fits import HEADS, fit, inputs, labels, refused
from small_fits import net as make_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import posthoc_uq as uq
from posthoc_uq import PosthocUQError
from posthoc_uq.core import Batch, BatchReader, as_targets, batches_of_call, check_loader, check_reusable
from posthoc_uq.core.batches import batches
from posthoc_uq.heads import LinearizedPredictor

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
CPU = torch.device("cpu")


def _same(
    batch: Batch, args: tuple[Any, ...], targets: Tensor | None, kwargs: dict[str, Any] | None = None
) -> None:
    assert len(batch.args) == len(args) and batch.kwargs.keys() == (kwargs or {}).keys()
    assert all(a is b or torch.equal(a, b) for a, b in zip(batch.args, args, strict=True))
    assert all(
        batch.kwargs[name] is value or torch.equal(batch.kwargs[name], value)
        for name, value in (kwargs or {}).items()
    )
    assert (batch.targets is None) == (targets is None)
    assert targets is None or torch.equal(batch.targets, targets)


def test_forms_that_need_no_help() -> None:
    reader = BatchReader(CPU)
    _same(reader.read(X), (X,), None)
    _same(reader.read((X, Y)), (X,), Y)
    _same(reader.read([X, Y]), (X,), Y)
    _same(reader.read([X]), (X,), None)
    _same(reader.read((X, [0, 1, 2, 3, 4, 5])), (X,), Y)
    _same(reader.read(((X, Y), Y)), (X, Y), Y)
    _same(reader.read(({"a": X, "n": 3}, Y)), (), Y, {"a": X, "n": 3})


@pytest.mark.parametrize("name", ["labels", "label", "targets", "target", "y"])
def test_mappings_hold_their_targets_under_a_usual_name(name: str) -> None:
    given = {"a": X, name: Y, "flag": True}
    _same(BatchReader(CPU).read(given), (), Y, {"a": X, "flag": True})
    assert set(given) == {"a", name, "flag"}
    _same(BatchReader(CPU).read({"a": X}), (), None, {"a": X})


def test_mappings_whose_names_are_not_the_models() -> None:
    def read(batch: dict[str, Any], *names: str) -> Batch:
        return BatchReader(CPU, names=names).read(batch)

    paths = ["a", "b"]
    _same(read({"image": X, "label": Y}, "x"), (X,), Y)
    _same(read({"image": X}, "x", "mask"), (X,), None)
    _same(read({"image": X, "label": Y, "path": paths}, "x"), (X,), Y)
    _same(read({"x": X, "label": Y, "path": paths}, "x"), (), Y, {"x": X})
    _same(read({"x": X, "mask": X, "y": Y}, "x", "mask"), (), Y, {"x": X, "mask": X})
    _same(read({"image": X, "index": Y}, "x"), (), None, {"image": X, "index": Y})
    _same(read({"x": X, "index": Y}, "x"), (), None, {"x": X})
    assert BatchReader.of(nn.Linear(2, 3)).names == ("input",)


class _Takes(nn.Linear):
    """Takes two inputs, and can do without the third."""

    def forward(self, x: Tensor, extra: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return x + extra


def test_what_a_model_takes_says_which_parts_are_inputs(recwarn: pytest.WarningsRecorder) -> None:
    one, two, paths = BatchReader.of(nn.Linear(2, 3)), BatchReader.of(_Takes(2, 2)), ["a"] * 6
    _same(two.read((X, 2 * X, Y)), (X, 2 * X), Y)
    _same(two.read(((X, 2 * X), Y)), (X, 2 * X), Y)
    _same(two.read((X, paths, 2 * X, Y)), (X, 2 * X), Y)
    _same(one.read((X, Y, paths)), (X,), Y)
    _same(one.read((X, paths, Y)), (X,), Y)
    weighted = BatchReader.of(_Takes(2, 2), batch_to_weights=lambda batch: batch[-1])
    _same(weighted.read((X, 2 * X, Y, torch.ones(6))), (X, 2 * X), Y)
    _same(two.read({"x": X, "extra": X, "labels": Y, "mask": X}), (), Y, {"x": X, "extra": X, "mask": X})
    assert not len(recwarn)
    with pytest.warns(UserWarning, match=r"'attention' is none of .* could also take 'mask'"):
        _same(two.read({"x": X, "extra": X, "labels": Y, "attention": X}), (), Y, {"x": X, "extra": X})
    # x alone is too little, so that nothing is left out
    _same(two.read({"x": X, "other": X}), (), None, {"x": X, "other": X})


@pytest.mark.parametrize(
    ("name", "values"), [("input", labels()), ("input", labels().tolist()), ("image", labels().tolist())]
)
def test_targets_under_a_name_that_is_not_looked_for_are_told(
    name: str, values: Any, recwarn: pytest.WarningsRecorder
) -> None:
    model, batch = nn.Linear(4, 3), {name: inputs(), "cls": values, "path": ["a"] * len(inputs())}
    options: dict[str, Any] = {"prior_precision": 1.0, "progress": False}
    with pytest.warns(UserWarning, match=r"no targets under any of .*'cls' is none .* batch\['cls'\]"):
        posterior = uq.fit(model, [batch], **options)
    recwarn.clear()
    uq.wrap(model, posterior).predict([batch], progress=False)  # which has no use for them
    uq.fit(model, [{name: inputs(), "path": ["a"] * len(inputs())}], **options)
    assert not len(recwarn)
    for call in (
        lambda: uq.calibrate(posterior, [batch], progress=False),
        lambda: uq.tune(posterior, [batch], progress=False),
        lambda: uq.evaluate(uq.wrap(model, posterior), [batch], progress=False),
    ):
        refused("under one of .*'labels'.* batch_to_targets=", call)


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.near, self.far = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"near": self.near(x), "far": self.far(x)}


def test_targets_of_the_name_of_the_output() -> None:
    model, plain = _Heads(), (inputs(), labels())
    named = (inputs(), {"far": labels(), "near": 0 * labels()})
    options: dict[str, Any] = {"prior_precision": 1.0, "progress": False, "output": "far"}
    posterior = uq.fit(model, [named], uq.Diagonal(fisher="empirical"), **options)
    same = uq.fit(model, [plain], uq.Diagonal(fisher="empirical"), **options)
    posterior = uq.tune(posterior, [named], progress=False)
    same = uq.tune(same, [plain], progress=False)
    predictors = uq.wrap(model, posterior), uq.wrap(model, same)
    assert torch.equal(predictors[0](inputs()).probs, predictors[1](inputs()).probs)
    measured = [
        uq.evaluate({"p": p, "model": model}, [batch], progress=False).metrics
        for p, batch in zip(predictors, (named, plain), strict=True)
    ]
    assert measured[0] == measured[1]
    refused(
        r"mapping of \['a', 'b'\], and none is output='far'",
        lambda: uq.tune(posterior, [(inputs(), {"a": labels(), "b": labels()})], progress=False),
    )


WHOLE = [torch.uint8, torch.int8, torch.int32, torch.uint16, torch.uint32, torch.uint64]


def test_targets_of_every_type_that_has_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 3))

    def variances(targets: Tensor) -> Tensor:
        method, options = uq.Diagonal(fisher="empirical"), {"prior_precision": 1.0, "progress": False}
        posterior = uq.fit(model, [(inputs(), targets)], method, **options)
        return uq.wrap(model, posterior, "linearized", link="mc").distribution(inputs()).variance

    wanted = variances(labels())
    for dtype in WHOLE:
        assert torch.equal(variances(labels().to(dtype)), wanted)
    assert torch.equal(variances(labels().to_sparse()), wanted)
    assert as_targets(torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn)).tolist() == [0.5, 2.0]
    too_large = torch.tensor(np.array([2**63], dtype=np.uint64))
    for targets, message in (
        (labels().to(torch.complex64), "complex64, and a likelihood takes real numbers"),
        (labels().to("meta"), r"on the meta device, int64 \(12,\)"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested tensor"),
        (too_large, "too large for int64"),
    ):
        refused(message, lambda targets=targets: as_targets(targets))
        prediction = uq.Categorical().from_draws(torch.randn(2, 12, 3))
        refused(message, lambda targets=targets, p=prediction: p.log_prob(targets))


def test_labels_of_one_byte_beside_more_classes_than_it_counts() -> None:
    outputs = torch.randn(2, 300)
    for labels_of_a_byte in (
        torch.tensor([7, 200], dtype=torch.uint8),
        torch.tensor([7, 100], dtype=torch.int8),
    ):
        uq.Categorical().check(outputs, labels_of_a_byte)
        assert len(uq.Categorical().from_draws(outputs.unsqueeze(0)).log_prob(labels_of_a_byte)) == 2


def test_functions_take_the_rest_apart() -> None:
    three = (X, "path", Y)
    both = BatchReader(CPU, lambda b: b[0], lambda b: b[2])
    _same(both.read(three), (X,), Y)
    _same(BatchReader(CPU, lambda b: (b[0], b[2])).read(three), (X, Y), None)
    _same(BatchReader(CPU, lambda b: {"a": b[0]}).read(three), (), None, {"a": X})
    _same(BatchReader(CPU, lambda b: b[0] + 1).read((X, Y)), (X + 1,), Y)  # a pair still has its targets
    _same(BatchReader(CPU, None, lambda b: b[1] * 2).read((X, Y)), (X,), 2 * Y)
    _same(BatchReader(CPU, lambda b: b.x, lambda b: b.y).read(SimpleNamespace(x=X, y=Y)), (X,), Y)


def test_tensors_go_to_the_device_and_other_values_stay() -> None:
    batch = BatchReader(torch.device("meta")).read(({"a": X, "n": 3}, Y))
    assert batch.kwargs["a"].device.type == "meta" and batch.targets is not None
    assert batch.targets.device.type == "meta" and batch.kwargs["n"] == 3


def test_narrow_cuts_what_counts_the_samples() -> None:
    mask, scalar = torch.ones(4, 4), torch.tensor(2.0)
    part = Batch((X, mask, scalar, "name"), Y, {"a": X}).narrow(1, 2, 6)
    assert torch.equal(part.args[0], X[1:3]) and part.args[1] is mask and part.args[2] is scalar
    assert part.args[3] == "name" and torch.equal(part.kwargs["a"], X[1:3])
    assert part.targets is not None and part.targets.tolist() == [1, 2]
    assert Batch((X,)).narrow(0, 2, 6).targets is None


def test_loaders_of_every_kind() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(zip(X, Y, strict=True))

    dataset = TensorDataset(X, Y)
    for loader in (
        DataLoader(dataset, 4),
        DataLoader(Stream(), 4),
        [(X[:4], Y[:4]), (X[4:], Y[4:])],
        iter(DataLoader(dataset, 4)),
    ):
        read = list(batches(loader, BatchReader(CPU)))
        assert [len(b.args[0]) for b in read] == [4, 2]
        assert torch.equal(torch.cat([b.args[0] for b in read]), X)
        assert torch.equal(torch.cat([b.targets for b in read if b.targets is not None]), Y)


def test_an_iterator_can_be_read_once() -> None:
    for loader in (iter([X]), (x for x in [X]), map(abs, [X])):
        check_reusable(loader, 1)
        with pytest.raises(PosthocUQError, match="2 times"):
            check_reusable(loader, 2)
    state = torch.get_rng_state()
    for loader in ([X], DataLoader(TensorDataset(X, Y), shuffle=True)):
        check_reusable(loader, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_calls_the_model_with_its_arguments() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, *, factor: int) -> tuple[Tensor, str]:
            return x * factor, "rest"

    batch = Batch((X,), None, {"factor": 3})
    assert torch.equal(batch.call(Model()), 3 * X)
    assert len(batch.tensors) == 1


def test_data_that_are_a_loader() -> None:
    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    for right in (
        [(x, y)],
        x.split(2),
        iter([x]),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y)),
    ):
        check_loader(right)


@pytest.fixture(scope="module")
def net() -> nn.Sequential:
    return make_net()


@pytest.fixture(scope="module")
def posterior(net: nn.Sequential) -> uq.Posterior:
    return fit(net, [(inputs(), labels())])


WRONG: dict[str, tuple[Tensor, str]] = {
    "too few columns": (inputs()[:, :3], r"float32 \(12, 3\).*cannot be multiplied"),
    "float64": (inputs().double(), r"float64 \(12, 4\).*pass x\.to\(torch\.float32\)"),
    "integers": (inputs().long(), r"int64 \(12, 4\).*unless the model takes integers"),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("case", WRONG)
def test_inputs_that_the_model_does_not_take(
    net: nn.Sequential, posterior: uq.Posterior, head: str, case: str
) -> None:
    x, message = WRONG[case]
    predictor = cast(Any, uq.wrap(net, posterior, head))
    calls = [predictor, predictor.novelty, lambda x: predictor.predict([x], progress=False)]
    calls += [predictor.outputs] if head == "sampling" else [predictor.functional_variance]
    for call in calls:
        refused(f"cannot be run on these inputs, {message}", lambda call=call: call(x), cause=RuntimeError)
    assert len(predictor(inputs())) == 12


class _OfTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, scale = pair
        return self.layer(x) * scale


class _Unpacked(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(inputs)


def test_a_model_of_one_tuple() -> None:
    loader = [((inputs(), torch.ones(12, 1)), labels())]
    refused(r"takes \['pair'\].*whole tuple.*forward\(self, \*inputs\)", lambda: fit(_OfTuple(), loader))
    fit(_Unpacked(_OfTuple()), loader)
    refused(r"more than it takes", lambda: fit(_Unpacked(_Refusing()), loader))


class _Refusing(nn.Module):
    """Whose error has nothing to do with the number of arguments that its module takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, pair: tuple[Tensor, ...]) -> Tensor:
        raise ValueError("more than it takes")


@pytest.mark.parametrize("head", ["linearized", "moments"])
def test_one_sample_without_its_dimension(net: nn.Sequential, posterior: uq.Posterior, head: str) -> None:
    predictor = uq.wrap(net, posterior, head)
    refused(
        r"shape \(3,\) for these inputs, float32 \(4,\).*x\.unsqueeze\(0\)", lambda: predictor(inputs()[0])
    )


def test_an_error_of_another_origin_is_passed_on(
    net: nn.Sequential, posterior: uq.Posterior, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("not the model's")

    monkeypatch.setattr(LinearizedPredictor, "_linearized", broken)
    with pytest.raises(RuntimeError, match="not the model's"):
        uq.wrap(net, posterior, "linearized")(inputs())


def test_arrays_are_batches() -> None:
    x, y = inputs(), labels()
    expected = fit(make_net(), [(x, y)])
    forms: dict[str, Any] = {
        "NumPy": (x.numpy(), y.numpy()),
        "pandas": (pd.DataFrame(x.numpy()), pd.Series(y.numpy(), index=range(100, 112))),
        "float64": (x.double().numpy(), y.numpy()),
        "codes of a category": (
            pd.DataFrame(x.double().numpy()),
            pd.Series(y.numpy()).astype("category").cat.codes,
        ),
        "read only": (np.broadcast_to(x.numpy(), x.shape), y.tolist()),
    }
    for name, batch in forms.items():
        found = fit(make_net(), [batch])
        for layer, variance in expected.variance().items():
            assert torch.equal(variance, found.variance()[layer]), name
    model = make_net()
    predictor = uq.wrap(model, fit(model, [(x, y)]))
    found = cast(Any, predictor.predict([x.numpy()[:5], x.numpy()[5:]], progress=False))
    assert torch.allclose(found.probs, cast(Any, predictor(x)).probs, atol=1e-6)
    frame = pd.DataFrame(x.double().numpy())
    assert torch.equal(cast(Any, predictor(frame)).probs, cast(Any, predictor(x)).probs)
    assert torch.equal(predictor.novelty(frame.to_numpy()), predictor.novelty(x))
    assert "accuracy" in str(uq.evaluate(predictor, [(frame, y)], progress=False))
    ids = batches_of_call((np.arange(3),), {}, model, model)[0].args[0]
    assert ids.dtype == torch.int64  # whole numbers stay what they are
    wide = make_net().double()
    fit(wide, [(x.numpy(), y)])


def test_batches_without_samples_are_left_out() -> None:
    """As from the fit of every method, from what a search for a prior keeps, and from predictions."""
    options = {"method": "inf", "prior_precision": None}
    x, y = inputs(), labels()
    empty = (x[:0], y[:0])
    data = [(x[:7], y[:7]), (x[7:], y[7:])]
    expected = fit(make_net(), data, **options)
    model = make_net()
    found = fit(model, [empty, data[0], empty, data[1], empty], **options)
    assert found.scale == expected.scale == 12
    assert all(torch.equal(value, found.variance()[name]) for name, value in expected.variance().items())
    predictor = uq.wrap(model, found)
    assert len(predictor.predict([x[:0], x], progress=False)) == 12


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.readout = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.words(tokens).mean(1))


@pytest.mark.filterwarnings("ignore:Weights without a posterior")
def test_token_ids_that_an_embedding_does_not_have() -> None:
    tokens = torch.arange(12).reshape(6, 2) % 5
    model = _Tokens()
    fitted = fit(model, [tokens], layers="last", fisher="exact")
    for wrong, given in ((tokens + 95, "95 to 99"), (tokens - 1, "-1 to 3")):
        message = rf"Embedding 'words' has rows 0 to 4, and was given ids from {given}"
        refused(message, lambda wrong=wrong: fit(model, [wrong]), cause=IndexError)
        refused(message, lambda wrong=wrong: fit(model, [tokens, wrong], layers="last"), cause=IndexError)
        for head in HEADS:
            refused(
                message, lambda wrong=wrong, head=head: uq.wrap(model, fitted, head)(wrong), cause=IndexError
            )
    refused(r"'words' takes whole numbers.*x\.long\(\)", lambda: fit(model, [tokens.float()]))


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.readout = nn.Linear(4, 3)

    def forward(self, pixels: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.readout(pixels)


class _Whole(_Named):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return self.readout(batch["pixels"])


class _Told(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(inputs)


def test_mappings_as_arguments_and_in_their_place() -> None:
    loader = [({"pixels": inputs()}, labels())]
    model, whole = _Named(), _Whole()
    fitted = fit(model, loader)
    message = r"named arguments here, predictor\(\*\*mapping\)"
    positional: dict[str, Any] = {"batch_to_inputs": lambda batch: (batch[0],)}
    for one in (model, whole):
        refused(message, lambda one=one: fit(one, loader, **positional))
    for head in HEADS:
        predictor = cast(Any, uq.wrap(model, fitted, head))
        refused(message, lambda predictor=predictor: predictor.predict(loader, progress=False, **positional))
        assert len(predictor(pixels=inputs())) == len(predictor({"pixels": inputs()})) == 12
    refused(
        r"takes one argument, 'batch'.*forward\(self, \*\*inputs\)",
        lambda: fit(whole, loader),
        cause=TypeError,
    )
    named = [
        {"pixels": inputs(), "label": labels(), "value": inputs()},
        {"pixels": inputs(), "labels": labels()},
    ]
    refused(
        r"It looks up 'pixels' in a tensor.*forward\(self, \*\*inputs\) returns self.model\(inputs\)",
        lambda: fit(whole, named[1:]),
    )
    refused(r"batch\['pixels'\], or another of \['value'\]", lambda: fit(whole, named), cause=TypeError)
    told = fit(_Told(whole), named[1:])  # as the errors say
    assert torch.equal(uq.wrap(_Told(whole), told)(named[1]).probs, uq.wrap(model, fitted)(named[1]).probs)
    refused(
        r"takes \['pixels', 'mask'\], and the batch names \['x'\]",
        lambda: fit(model, [({"x": inputs()}, labels())]),
        cause=TypeError,
    )


class _Pairs(nn.Module):
    """Takes two tensors, the second of which it can do without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.readout = nn.Linear(4, 3)

    def forward(self, left: Tensor, right: Tensor | None = None) -> Tensor:
        return self.readout(left if right is None else left + right)


@pytest.mark.parametrize("head", HEADS)
def test_a_predictor_takes_a_batch_as_the_loader_gave_it(head: str) -> None:
    x, y, path = inputs(), labels(), [f"{i}.png" for i in range(12)]
    model = make_net()
    for loader in (
        [(x, y)],
        [[x, y]],
        [{"image": x, "label": y}],
        [{"input": x, "targets": y, "path": path}],
        [{"image": x.numpy(), "y": y.numpy()}],
        DataLoader([{"image": x[i], "label": y[i], "path": path[i]} for i in range(12)], 12),
    ):
        posterior = fit(model, loader)
        assert posterior.evidence.total == 12
        predictor = cast(Any, uq.wrap(model, posterior, head))
        whole = predictor(x).probs
        for batch in loader:
            kept = copy.deepcopy(batch)
            assert torch.equal(predictor(batch).probs, whole)
            assert torch.equal(predictor.novelty(batch), predictor.novelty(x))
            drawn = [
                predictor.functional_samples(inputs, n_samples=2, generator=torch.Generator().manual_seed(1))
                for inputs in (batch, x)
            ]
            assert torch.equal(*drawn)
            assert str(batch) == str(kept)
        assert torch.equal(predictor.predict(loader, progress=False).probs, whole)
        assert torch.equal(predictor([x]).probs, whole)
        evaluated = uq.evaluate({"network": model, "posterior": predictor}, loader, progress=False)
        assert evaluated.metrics["posterior"]["accuracy"] > 0

    pairs = _Pairs()
    fitted = fit(pairs, [{"left": x, "right": x, "label": y}], layers=["readout"])
    own = cast(Any, uq.wrap(pairs, fitted, head))
    assert torch.equal(own({"left": x, "right": x, "label": y}).probs, own(x, x).probs)
    assert torch.equal(own({"left": x, "label": y, "path": path}).probs, own(x).probs)
    assert torch.equal(own(((x, x), y)).probs, own(x, x).probs)
    refused(r"takes \['left', 'right'\], and the batch names", lambda: own({"first": x, "second": x}))
    for samples in ([x[0], x[1]], [x, x, x]):
        refused("The model cannot be run|holds a list", lambda samples=samples: own(samples))


def test_a_noise_of_every_sample_is_told_to_be_a_weight() -> None:
    message = r"batch_to_weights=lambda batch: 1 / sd\*\*2"
    data = [(inputs(), inputs()[:, :1])]
    for noise in (torch.rand(12) + 1, [1.0] * 12):
        refused(
            message,
            lambda noise=noise: fit(nn.Linear(4, 1), data, likelihood="regression", noise_variance=noise),
        )
