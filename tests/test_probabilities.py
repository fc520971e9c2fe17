"""Models that give probabilities in place of logits, and binary labels in a column."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from small_fits import fit, inputs, labels, refused
from small_fits import net as make_net
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import BatchReader
from posthoc_uq.fitting.first_batch import gives_probabilities
from posthoc_uq.likelihoods import resolve_likelihood


@pytest.fixture(scope="module")
def net() -> nn.Sequential:
    return make_net()


@pytest.fixture(scope="module")
def posterior(net: nn.Sequential) -> uq.Posterior:
    return fit(net, [(inputs(), labels())])


class _Binary(nn.Module):
    """One output, through a function at the end."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.last = nn.Linear(4, 1), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(x)).squeeze(1)


def _constant(last: nn.Module) -> nn.Sequential:
    """A network whose outputs are the same for all inputs."""
    model = make_net(last)
    with torch.no_grad():
        model[2].weight.zero_()
    return model


class _Softmax(nn.Module):
    """A softmax without the function of that name."""

    def forward(self, x: Tensor) -> Tensor:
        powers = (x - x.amax(1, keepdim=True)).exp()
        return powers / powers.sum(1, keepdim=True)


def _least_squares() -> nn.Sequential:
    """A linear model of one-hot labels by least squares: its outputs sum to 1 at every input, and lie in [0, 1]."""
    design = torch.cat([inputs().double(), torch.ones(len(inputs()), 1)], 1)
    solution = torch.linalg.lstsq(
        design, 0.5 / 3 + 0.5 * nn.functional.one_hot(labels(), 3).double()
    ).solution
    model = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight.copy_(solution[:-1].T)
        model[0].bias.copy_(solution[-1])
        outputs = model(inputs())
    assert bool(((outputs >= 0) & (outputs <= 1)).all()) and torch.allclose(
        outputs.sum(1), torch.ones(len(inputs()))
    )
    return model


def _thirds() -> nn.Sequential:
    """A new last layer without weights yet, whose bias gives all classes a third."""
    model = make_net()
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.fill_(1 / 3)
    return model


# model, likelihood, whether its outputs are probabilities
ENDS: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "softmax": (lambda: make_net(nn.Softmax(1)), "classification", True),
    "softmax of constant logits": (lambda: _constant(nn.Softmax(1)), "classification", True),
    "sigmoid": (lambda: _Binary(torch.sigmoid), "binary", True),
    "sigmoids of several labels": (lambda: make_net(nn.Sigmoid()), "multilabel", True),
    "softmax by hand": (lambda: make_net(_Softmax()), "classification", True),
    "softmax within a model": (lambda: nn.Sequential(make_net(nn.Softmax(1))), "classification", True),
    "log_softmax": (lambda: make_net(nn.LogSoftmax(1)), "classification", False),
    "log-sigmoids": (lambda: make_net(nn.LogSigmoid()), "multilabel", False),
    "least squares": (_least_squares, "classification", False),
    "logits that are all a third": (_thirds, "classification", False),
    "logits": (make_net, "classification", False),
    "positive logits": (lambda: make_net(nn.Softplus()), "classification", False),
    "sigmoids of several classes": (lambda: make_net(nn.Sigmoid()), "classification", False),
    "logit": (lambda: _Binary(lambda z: z), "binary", False),
    "logits within 0 and 1": (lambda: _Binary(lambda z: 0.5 + 0.1 * torch.tanh(z)), "binary", False),
    "softmax of a regression": (lambda: make_net(nn.Softmax(1)), "regression", False),
}


def _targets_of(likelihood: str) -> Tensor:
    return {
        "classification": labels(),
        "binary": labels() % 2,
        "multilabel": torch.stack([labels() % 2, labels() // 2, labels() % 2], 1),
        "regression": inputs()[:, :3],
    }[likelihood]


@pytest.mark.parametrize("case", ENDS)
def test_a_model_that_ends_in_probabilities(case: str) -> None:
    build, likelihood, probabilities = ENDS[case]
    model, loader = build(), [(inputs(), _targets_of(likelihood))]
    if not probabilities:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fit(model, loader, likelihood=likelihood)
        return
    kind = type(resolve_likelihood(likelihood))
    refused(
        rf"outputs are probabilities.*likelihood='{likelihood}' takes logits.*(model\[:-1\]|Identity).*"
        rf"uq\.{kind.__name__}\(\)",
        lambda: fit(model, loader, likelihood=likelihood),
    )
    with pytest.warns(UserWarning, match="given as an object"):
        posterior = fit(model, loader, likelihood=kind())
    assert bool(uq.wrap(model, posterior)(inputs()).probs.isfinite().all())


@pytest.mark.parametrize("samples", [1, 2])
def test_probabilities_of_few_samples(samples: int) -> None:
    refused(
        "outputs are probabilities",
        lambda: fit(make_net(nn.Softmax(1)), [(inputs(samples), labels()[:samples])]),
    )


class _Gated(nn.Module):
    """A network with a sigmoid within and a softmax at the end, which is a module of some name."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inner, self.last = (
            nn.Sequential(nn.Linear(4, 8), nn.Sigmoid()),
            nn.Linear(4, 8),
            nn.Linear(8, 3),
        )
        self.probabilities = nn.Softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.probabilities(self.last(self.gate(x) * self.inner(x)))


def test_the_module_that_makes_probabilities_is_named() -> None:
    torch.manual_seed(0)
    model, loader = _Gated(), [(inputs(), labels())]
    refused(r"model\.set_submodule\('probabilities', torch\.nn\.Identity\(\)\)", lambda: fit(model, loader))
    assert isinstance(model.probabilities, nn.Softmax), "the model is as it was"
    model.set_submodule("probabilities", nn.Identity())
    fit(model, loader)


class _PerPosition(nn.Module):
    """One logit a position, or the two classes that the error advises."""

    def __init__(self, two: bool) -> None:
        super().__init__()
        self.layer, self.two = nn.Linear(1, 1), two

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x.unsqueeze(2)).squeeze(2)
        return torch.stack([0 * z, z], 1) if self.two else z


def test_binary_positions_are_two_classes() -> None:
    targets = (inputs() > 0).long()
    model, two = _PerPosition(two=False), _PerPosition(two=True)
    refused(
        r"as its labels do, by output=lambda z: z.unsqueeze\(1\)",
        lambda: fit(model, [(inputs(), targets)], likelihood="binary"),
    )
    two.load_state_dict(model.state_dict())
    loader = [(inputs(), targets.unsqueeze(1))]
    posterior = fit(model, loader, likelihood="binary", output=lambda z: z.unsqueeze(1))
    prediction = cast(Any, uq.wrap(model, posterior)(inputs()))
    assert prediction.entropy().shape == targets.shape
    expected = cast(Any, uq.wrap(two, fit(two, [(inputs(), targets)]))(inputs()))
    torch.testing.assert_close(prediction.probs, expected.probs)


def test_classes_that_could_be_in_two_dimensions_are_said() -> None:
    model, inputs_ = nn.Linear(4, 5), torch.randn(6, 5, 4)
    labels = torch.randint(5, (6, 5))
    with pytest.warns(
        UserWarning, match="fit classes in dimension 1 and in dimension -1; the former is taken"
    ):
        fit(model, [(inputs_, labels)], likelihood="classification")
    refused(
        r"have one class. One logit of each position is likelihood='binary'",
        lambda: fit(
            nn.Conv2d(3, 1, 1),
            [(torch.randn(4, 3, 5, 5), torch.ones(4, 5, 5).long())],
            likelihood="classification",
        ),
    )


def test_masks_with_one_channel_are_refused_with_what_makes_labels_of_them() -> None:
    model, images = nn.Conv2d(3, 2, 1), torch.randn(4, 3, 5, 5)
    masks = (images[:, :1] > 0).float()
    refused(
        r"whole numbers: .*batch\[1\]\.long\(\)\.squeeze\(1\)",
        lambda: fit(model, [(images, masks)], likelihood="classification"),
    )
    fit(
        model,
        [(images, masks)],
        likelihood="classification",
        batch_to_targets=lambda batch: batch[1].long().squeeze(1),
    )


class _Troubled(nn.Module):
    """A network for whole batches of 40 samples, which may run out of memory, or have a fault of its own."""

    def __init__(self, trouble: Callable[[int], Exception | None]) -> None:
        super().__init__()
        self.net, self.trouble = make_net(nn.Softmax(1)), trouble

    def forward(self, x: Tensor) -> Tensor:
        error = self.trouble(len(x))
        if error is not None:
            raise error
        return self.net(x)


def test_a_look_at_outputs_that_fails() -> None:
    x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(3)), torch.arange(40) % 3

    def outcome(trouble: Callable[[int], Exception | None]) -> bool:
        model = _Troubled(trouble)
        batch = BatchReader.of(model).read((x, y))
        return gives_probabilities(model, batch, uq.Categorical())

    assert outcome(lambda n: None)
    assert outcome(lambda n: None if n == 40 else ValueError("40 samples")), "then all of them are looked at"
    with pytest.raises(torch.cuda.OutOfMemoryError):
        outcome(lambda n: torch.cuda.OutOfMemoryError("full") if n == 16 else None)
    refused("KeyError: 'mine'", lambda: outcome(lambda n: KeyError("mine")))


def test_binary_labels_in_a_column(net: nn.Sequential, posterior: uq.Posterior) -> None:
    model = _Binary(lambda z: z)
    y = (labels() % 2).reshape(-1, 1)
    prediction = cast(Any, uq.wrap(model, fit(model, [(inputs(), y)], likelihood="binary")))(inputs())
    expected = prediction.log_prob(y.flatten())
    for given in (y, y.float(), y.flatten().double(), y.bool()):
        assert torch.equal(prediction.log_prob(given), expected)
    refused("Soft labels must be probabilities", lambda: prediction.log_prob(y + 0.5))
    refused("between 0 and 1", lambda: prediction.log_prob(y + 1.0))
    several = cast(Any, uq.wrap(net, posterior)(inputs()))
    refused("integer labels", lambda: several.log_prob(labels().reshape(-1, 1)))
