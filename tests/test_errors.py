"""A user's mistakes: each is one exception of ours, whose message names what is wrong and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core.errors import NonFiniteError, PosteriorMismatchError, PosthocUQError
from posthoc_uq.likelihoods import Gaussian
from posthoc_uq.methods import method_of

SAMPLES = 10


def _net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def _x() -> Tensor:
    return torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))


def _y() -> Tensor:
    return torch.arange(SAMPLES) % 3


def _data() -> list[tuple[Tensor, Tensor]]:
    return list(zip(_x().split(4), _y().split(4), strict=True))


def _fit(model: nn.Module | None = None, loader: Any = None, **options: Any) -> uq.Posterior:
    options = {"prior_precision": 1.0, "progress": False, "method": "diag"} | options
    return uq.fit(model or _net(), _data() if loader is None else loader, **options)


def _refused(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    """The exception is of exactly this kind, says this, and in one readable piece."""
    with pytest.raises(kind, match=message) as caught:
        call()
    assert type(caught.value) is kind
    assert 20 < len(str(caught.value)) < 500


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "laplace"}, r"method must be one of .*'inf'.*'laplace'"),
    "method in other letters": ({"method": "INF"}, r"Did you mean 'inf'\?"),
    "a class's name as method": ({"method": "FunctionSpace"}, r"Did you mean 'function_space'\?"),
    "a class as likelihood": ({"likelihood": uq.Gaussian}, r"likelihood is a class.*Gaussian\(\)"),
    "likelihood": ({"likelihood": "student"}, r"likelihood must be one of .*'regression'.*'student'"),
    "fisher": ({"fisher": "type-2"}, r"fisher must be one of .*'mc'.*'type-2'"),
    "n_samples of nothing": ({"n_samples": 0}, "n_samples must be"),
    "n_samples without draws": ({"n_samples": 3, "fisher": "exact"}, r"n_samples .*fisher='mc'"),
    "rank of another method": ({"rank": 10}, r"method='diag' does not take \['rank'\].*'n_samples'"),
    "basis of another method": (
        {"method": "kfac", "basis": "exact"},
        r"method='kfac' does not take "
        r"\['basis'\]",
    ),
    "correction of another method": (
        {"method": "efb", "correction": "clamp"},
        r"does not take "
        r"\['correction'\]",
    ),
    "None as a rank": ({"method": "inf", "rank": None}, r"rank must be .*, not None\."),
    "negative rank": ({"method": "inf", "rank": -1}, "rank must be"),
    "broken rank": ({"method": "inf", "rank": 2.5}, "rank must be"),
    "basis": ({"method": "inf", "basis": "full"}, r"basis must be one of .*'sketch'.*'full'"),
    "correction": ({"method": "inf", "correction": "clip"}, r"correction must be one of .*'rescale'.*'clip'"),
    "negative prior": ({"prior_precision": -1.0}, "prior_precision must be"),
    "no prior": ({"prior_precision": 0.0}, "prior_precision must be"),
    "infinite prior": ({"prior_precision": float("inf")}, "prior_precision must be"),
    "prior in words": ({"prior_precision": "best"}, r"prior_precision must be .*'evidence'.*'best'"),
    "residual weight": ({"method": "inf", "residual_weight": 2.0}, "residual_weight must be"),
    "unsupported": ({"unsupported": "ignore"}, "unsupported must be one of"),
    "dtype": ({"dtype": torch.float16}, r"dtype must be torch.float32 or torch.float64"),
    "budget": ({"memory_budget": 10}, "memory_budget must be"),
    "noise of a classifier": ({"noise_variance": 1.0}, r"noise_variance belongs to likelihood='regression'"),
    "negative noise": (
        {"likelihood": "regression", "noise_variance": -1.0},
        "noise_variance must be",
    ),
    "a mistyped method": ({"method": "kfca"}, r"Did you mean 'kfac'\?"),
    "a mistyped likelihood": ({"likelihood": "clasification"}, r"Did you mean 'classification'\?"),
    "a mistyped option": ({"method": "inf", "rnk": 5}, r"does not take \['rnk'\].* Did you mean 'rank'\?"),
    "two mistyped options": ({"method": "inf", "rnk": 5, "basi": 1}, r"Did you mean 'rank' or 'basis'\?"),
    "a mistyped argument": ({"liklihood": "binary"}, r"Did you mean 'likelihood'\?"),
    "a mistyped head": ({"head": "linearised"}, r"head must be one of .* Did you mean 'linearized'\?"),
    "a word for all layers": ({"layers": "al"}, r"no weighted layer 'al'.* Did you mean 'all'\?"),
    "a word for the last layer": ({"layers": "lst"}, r"there are \['0', '2'\]\. Did you mean 'last'\?"),
    "unknown layer": ({"layers": ["3"]}, r"no weighted layer '3'"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str) -> None:
    options, message = OPTIONS[case]
    _refused(PosthocUQError, message, lambda: _fit(**options))


_WORDS = {"a word for all layers", "a word for the last layer"}  # which may be the names of layers


def test_options_are_refused_before_any_data_are_read() -> None:
    class Untouchable:
        def __iter__(self) -> Any:
            raise AssertionError("the loader was read")

    for case in set(OPTIONS) - {"residual weight", "unsupported", "unknown layer", *_WORDS}:
        with pytest.raises(PosthocUQError):
            _fit(loader=Untouchable(), **OPTIONS[case][0])


@pytest.mark.parametrize(
    ("labels", "advice"),
    [
        (torch.zeros(12), r"pass y\.long\(\), or batch_to_targets=lambda batch: batch\[1\]\.long\(\)\."),
        (torch.zeros(12, 1), r"pass y\.long\(\)\.squeeze\(1\)"),
        (torch.zeros(12, 1).long(), r"pass y\.squeeze\(1\)"),
        (torch.full((12,), 0.5), r"float32 of shape \(12,\)\.$"),
    ],
)
def test_labels_of_another_type(labels: torch.Tensor, advice: str) -> None:
    x = torch.randn(12, 4)
    _refused(PosthocUQError, rf"Labels must be integers.*{advice}", lambda: _fit(loader=[(x, labels)]))
    if labels.ndim == 1 and not bool(labels.any()):
        loader = [(x, labels)]
        posterior = _fit(loader=loader, batch_to_targets=lambda batch: batch[1].long())
        assert posterior.evidence.total == 12


def test_weights_without_numbers(tmp_path: Path) -> None:
    net = _net()
    posterior = _fit(net)
    uq.save(posterior, tmp_path / "p.h5")
    empty, partly = _net().to("meta"), _net()
    partly[2].to("meta")
    for model in (empty, partly):
        for call in (
            lambda model=model: _fit(model),
            lambda model=model: uq.wrap(model, posterior),
            lambda model=model: uq.load(tmp_path / "p.h5", model),
        ):
            _refused(PosthocUQError, r"weight' is on the meta device.*CPU or a GPU", call)


def test_devices_that_are_not_there(tmp_path: Path) -> None:
    net = _net()
    uq.save(_fit(net), tmp_path / "p.h5")
    for device, message in {
        "xpu:90": r"device='xpu:90' is not there: .*leave device out",
        "graphics": "device='graphics' is not there: torch knows none of this name",
        "meta": "device='meta' is no place for numbers",
    }.items():
        _refused(
            PosthocUQError, message, lambda device=device: uq.load(tmp_path / "p.h5", net, device=device)
        )
    if not torch.cuda.is_available():
        said = "device='cuda' is not there: torch finds no cuda device that it can use"
        _refused(PosthocUQError, said, lambda: uq.load(tmp_path / "p.h5", net, device="cuda"))


def test_an_empty_loader() -> None:
    _refused(PosthocUQError, "yields no batch", lambda: _fit(loader=[]))


def test_a_loader_that_can_be_read_once() -> None:
    for method in ("efb", "inf"):
        _refused(
            PosthocUQError,
            "read only once.*2 times.*DataLoader",
            lambda m=method: _fit(loader=iter(_data()), method=m),
        )
    once = _fit(loader=(pair for pair in _data()))
    again = _fit()
    torch.testing.assert_close(once.blocks["0"].diagonal, again.blocks["0"].diagonal, rtol=0, atol=0)
    assert once.scale == SAMPLES


def test_models_without_weighted_layers() -> None:
    _refused(PosthocUQError, "no Linear or convolution layer", lambda: _fit(nn.BatchNorm1d(4)))
    _refused(PosthocUQError, "no parameters", lambda: _fit(nn.Flatten()))


def test_labels() -> None:
    x = _x()
    _refused(
        PosthocUQError,
        "run from 0 to 3, but the model has 3 outputs.*0..2",
        lambda: _fit(loader=[(x, torch.arange(SAMPLES) % 4)]),
    )
    _refused(PosthocUQError, "run from -1 to", lambda: _fit(loader=[(x, _y() - 1)]))
    _refused(
        PosthocUQError,
        r"integers of shape \(10,\), or probabilities of shape \(10, 3\), not torch.float32",
        lambda: _fit(loader=[(x, _y().float())]),
    )
    _refused(PosthocUQError, r"of shape \(10, 1\)", lambda: _fit(loader=[(x, _y()[:, None])]))
    _refused(PosthocUQError, r"of shape \(9,\)", lambda: _fit(loader=[(x, _y()[1:])]))
    binary = {"likelihood": "binary", "model": _net(1)}
    _refused(PosthocUQError, "must be 0 or 1", lambda: _fit(loader=[(x, _y())], **binary))
    _refused(PosthocUQError, "10 samples need as many labels", lambda: _fit(loader=[(x, _y()[:4])], **binary))


def test_the_batch_of_a_wrong_label_is_named() -> None:
    data = _data()
    data[2] = (data[2][0], data[2][1] + 5)
    _refused(PosthocUQError, "Batch 2: .*Labels run from 5", lambda: _fit(loader=data))


def test_outputs_that_do_not_fit_the_likelihood() -> None:
    _refused(PosthocUQError, r"\(4, 1\).*likelihood='binary'", lambda: _fit(_net(1)))
    _refused(PosthocUQError, r"'binary' needs outputs.*\(4, 3\)", lambda: _fit(likelihood="binary"))


def test_regression_targets() -> None:
    x, options = _x(), {"likelihood": "regression", "model": _net(2)}
    for given in ({}, {"noise_variance": 1.0}):
        for shape in [(SAMPLES,), (SAMPLES, 3), (SAMPLES - 1, 2)]:
            _refused(
                PosthocUQError,
                r"Targets of shape .* do not fit outputs of shape \(10, 2\)",
                lambda s=shape, g=given: _fit(loader=[(x, torch.zeros(s))], **options, **g),
            )
    bad = torch.zeros(SAMPLES, 2)
    bad[3, 1] = float("nan")
    _refused(PosthocUQError, "targets are not finite", lambda: _fit(loader=[(x, bad)], **options))
    with torch.no_grad():
        exact = options["model"](x)
    _refused(PosthocUQError, "without error.*noise_variance", lambda: _fit(loader=[(x, exact)], **options))


def test_inputs_that_are_not_finite() -> None:
    for value in ("nan", "inf"):
        x = _x()
        x[9, 2] = float(value)
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        _refused(
            NonFiniteError,
            "Batch 2: ",
            lambda m=model, d=x: _fit(m, list(zip(d.split(4), _y().split(4), strict=True))),
        )
        _refused(NonFiniteError, "Batch 0: ", lambda m=model, d=x: _fit(m, [(d.flip(0), _y())]))


def test_inputs_alone() -> None:
    _refused(
        PosthocUQError,
        "'empirical' needs labels.*'mc'",
        lambda: _fit(loader=list(_x().split(4)), fisher="empirical"),
    )
    posterior = _fit(loader=list(_x().split(4)), fisher="mc")
    torch.testing.assert_close(posterior.blocks["0"].diagonal, _fit(fisher="mc").blocks["0"].diagonal)
    _refused(PosthocUQError, "fit saw no labels.*(inputs, targets)", posterior.log_marginal_likelihood)


class Named(nn.Module):
    """Takes named inputs and returns an object with logits, as Hugging Face models do."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.form = _net(), form

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Any:
        return self.form(self.net(x * scale))


@pytest.mark.parametrize(
    "form",
    [
        lambda logits: SimpleNamespace(logits=logits),
        lambda logits: {"logits": logits, "loss": None},
        lambda logits: (logits, "hidden states"),
        lambda logits: logits,
    ],
)
@pytest.mark.parametrize("target", ["labels", "y", "target"])
def test_dict_batches_and_outputs_that_hold_logits(form: Callable[[Tensor], Any], target: str) -> None:
    loader = [{"x": 0.5 * x, target: y, "scale": torch.full((len(x), 1), 2.0)} for x, y in _data()]
    expected = _fit(fisher="exact")
    found = _fit(Named(form), loader, fisher="exact")
    torch.testing.assert_close(found.blocks["net.0"].diagonal, expected.blocks["0"].diagonal)
    assert float(found.log_marginal_likelihood()) == pytest.approx(
        float(expected.log_marginal_likelihood()), rel=1e-5
    )


def test_batches_of_three_parts_and_of_other_kinds() -> None:
    loader = [(x, torch.ones(len(x)), y) for x, y in _data()]
    _refused(PosthocUQError, "batches of 3 parts.*batch_to_inputs", lambda: _fit(loader=loader))
    _refused(PosthocUQError, "type str.*batch_to_inputs", lambda: _fit(loader=["batch"]))
    taken = _fit(
        loader=loader, batch_to_inputs=lambda b: b[0], batch_to_targets=lambda b: b[2], fisher="empirical"
    )
    expected = _fit(fisher="empirical").blocks["0"].diagonal
    torch.testing.assert_close(taken.blocks["0"].diagonal, expected, rtol=0, atol=0)
    several = _fit(
        Named(lambda z: z),
        loader,
        batch_to_inputs=lambda b: (b[0], b[1][:, None]),
        batch_to_targets=lambda b: b[2],
        fisher="empirical",
    )
    torch.testing.assert_close(several.blocks["net.0"].diagonal, expected)


@pytest.mark.parametrize(
    ("form", "named"),
    [
        (lambda z: "text", "str; one part must be"),
        (lambda z: None, "NoneType; one part must be"),
        (lambda z: z.argmax(1), r"Tensor of int64 \(2,\); it must return a tensor of logits"),
        (lambda z: {"p": z.argmax(1)}, r"dict of .p.: int64 \(2,\); one part must be"),
    ],
)
def test_outputs_that_are_no_tensor(form: Callable[[Tensor], Any], named: str) -> None:
    _refused(PosthocUQError, f"The model returned {named}", lambda: _fit(Named(form)))


def test_outputs_without_a_sample_dimension() -> None:
    _refused(
        PosthocUQError, r"outputs of shape \(3,\) for 2 samples", lambda: _fit(Named(lambda z: z.sum(0)))
    )


def test_a_loader_that_gives_another_number_of_samples_the_second_time() -> None:
    class Shrinks:
        reads = 0

        def __iter__(self) -> Any:
            Shrinks.reads += 1
            return iter(_data() if Shrinks.reads < 3 else _data()[:2])

    _refused(
        PosthocUQError,
        "10 samples in the first sweep and 8 in the next",
        lambda: _fit(loader=Shrinks(), method="efb"),
    )


def test_a_dense_posterior_that_is_too_large() -> None:
    model = nn.Sequential(nn.Linear(4, 5000), nn.ReLU(), nn.Linear(5000, 3))
    _refused(PosthocUQError, r"40003 x 40003 .*\(12 GiB\).*method='inf'", lambda: _fit(model, method="full"))


def test_hyperparameters_out_of_range() -> None:
    posterior = _fit()
    for name, value in [
        ("scale", -1.0),
        ("prior_precision", 0.0),
        ("noise_scale", float("nan")),
        ("temperature", 0),
        ("residual_weight", -0.1),
    ]:
        _refused(PosthocUQError, name, lambda n=name, v=value: setattr(posterior, n, v))
    _refused(
        PosthocUQError, r"every layer once.*'2'", lambda: setattr(posterior, "prior_precision", {"0": 1.0})
    )
    three = {"0": 1.0, "2": 1.0, "9": 1.0}
    _refused(PosthocUQError, r"every layer once.*'9'", lambda: setattr(posterior, "prior_precision", three))
    assert posterior.prior_precision == 1.0
    posterior.prior_precision = {"0": 1.0, "2": 3.0}
    assert posterior.layer_prior("2") == 3.0
    _refused(PosthocUQError, "number of draws must be", lambda: posterior.sample(0))
    _refused(PosthocUQError, "unknown: .'5'", lambda: posterior.quadratic({"5": torch.zeros(1, 1, 5, 5)}))


def test_wrapping_the_wrong_model() -> None:
    posterior = _fit()
    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    shapes = r"'0.weight' of shape \(5, 4\).*\(6, 4\)"
    _refused(PosteriorMismatchError, shapes, lambda: uq.wrap(other, posterior))
    absent = r"'2.weight' .*lacks"
    _refused(PosteriorMismatchError, absent, lambda: uq.wrap(nn.Sequential(_net()[0]), posterior))
    trained = _net()
    with torch.no_grad():
        trained[2].weight[0, 0] += 1e-6
    _refused(PosteriorMismatchError, r"values of parameter '2.weight'", lambda: uq.wrap(trained, posterior))
    _refused(
        PosthocUQError,
        r"head must be one of .*'ensemble'",
        lambda: uq.wrap(_net(), posterior, head="ensemble"),
    )
    _refused(PosthocUQError, "n_samples must be", lambda: uq.wrap(_net(), posterior, n_samples=0))
    assert uq.wrap(_net(), posterior, n_samples=2)(_x()).probs.shape == (SAMPLES, 3)


def test_a_likelihood_object_brings_its_noise() -> None:
    gaussian = Gaussian(0.3)
    _refused(PosthocUQError, "brings its own noise", lambda: _fit(likelihood=gaussian, noise_variance=0.1))
    x = _x()
    posterior = uq.fit(nn.Linear(4, 1), [(x, x[:, 0])], likelihood=gaussian, progress=False)
    assert posterior.history.tuning["noise variance"] == "given"
    assert posterior.noise_variance.tolist() == [0.3]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
def test_models_that_cannot_be_copied() -> None:
    _refused(PosthocUQError, "TorchScript", lambda: _fit(torch.jit.trace(_net(), _x())))
    lazy = nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3))
    _refused(PosthocUQError, "'0.weight' is not initialised", lambda: _fit(lazy))
    locked = _net()
    locked.generator = (i for i in range(3))
    _refused(PosthocUQError, "cannot be copied.*generator", lambda: _fit(locked))


def test_every_error_is_one_of_ours_and_exported() -> None:
    for name in (
        "UnsupportedLayerError",
        "PosteriorMismatchError",
        "CorruptPosteriorError",
        "NonFiniteError",
    ):
        assert issubclass(getattr(uq, name), uq.PosthocUQError)


def test_none_is_a_value_of_an_option() -> None:
    assert method_of("latent_binary", {"clip": None}) == uq.LatentBinary(clip=None)
    assert method_of("latent_binary", {}) == uq.LatentBinary()
