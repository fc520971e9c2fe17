"""Models that return more than a tensor: the chosen part is the outputs, everywhere, and nothing else changes."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from networks import heads_of, short
from torch import Tensor, nn
from watching import Watch

import posthoc_uq as uq
from posthoc_uq import PosthocUQError
from posthoc_uq.app import exportable
from posthoc_uq.core import OutputChoice, chosen_in, guessed_choice, output_tensor, with_choice

torchvision: Any = pytest.importorskip("torchvision")


@dataclass
class Data:
    scores: Tensor
    rest: Tensor


class Named(NamedTuple):
    scores: Tensor
    rest: Tensor


class Body(nn.Module):
    """A network of two layers and a second, larger last layer, which runs last."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Linear(3, 5).double()
            self.head = nn.Linear(5, 4).double()
            self.other = nn.Linear(5, 6).double()

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x).tanh()
        return self.head(features), self.other(features)


class Several(Body):
    """Returns `form` of the outputs of both last layers."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(*self.both(x))


class Plain(nn.Module):
    """The first of its outputs alone, without the weights of the second."""

    def __init__(self) -> None:
        super().__init__()
        body = Body()
        self.body, self.head = body.body, body.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def _x(n: int = 12, seed: int = 1) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)).double()


def _data() -> list[tuple[Tensor, Tensor]]:
    y = torch.arange(12) % 4
    return [(_x()[:7], y[:7]), (_x()[7:], y[7:])]


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Any]] = {
    "dict": (lambda a, b: OrderedDict(out=a, aux=b), None),
    "other key": (lambda a, b: {"a": a, "b": b}, "a"),
    "tuple": (lambda a, b: (b, a), 1),
    "from the end": (lambda a, b: [b, a], -1),
    "dataclass": (lambda a, b: Data(a, b), "scores"),
    "named tuple": (lambda a, b: Named(a, b), "scores"),
    "object": (lambda a, b: SimpleNamespace(logits=a, rest=b), None),
    "only one": (lambda a, b: (a, b.argmax(1), b.mean()), None),
    "function": (lambda a, b: {"deep": [b, (a,)]}, lambda returned: returned["deep"][1][0]),
}


@functools.cache
def of_the_part_alone() -> tuple[uq.Posterior, Any]:
    """The posterior and the predictions of the model that returns the chosen part."""
    plain = Plain()
    posterior = uq.fit(plain, _data(), progress=False)
    return posterior, uq.wrap(plain, posterior)(_x(5, 2))


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_posterior_and_the_predictions_of_the_part_alone(
    name: str, tmp_path: Path
) -> None:
    form, output = FORMS[name]
    model, x = Several(form), _x(5, 2)
    with Watch(model):
        posterior = uq.fit(model, _data(), output=output, progress=False)
        uq.save(posterior, tmp_path / "a.h5")
        function: Any = output if callable(output) else None
        again = uq.load(tmp_path / "a.h5", model, output=function)
        head = uq.wrap(model, again)
        found = head(x)
    expected_posterior, expected = of_the_part_alone()
    assert list(posterior.layers) == list(expected_posterior.layers) == ["body", "head"]
    torch.testing.assert_close(found.probs, expected.probs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.novelty(), expected.novelty(), rtol=1e-9, atol=1e-12)
    assert head.model is model
    assert posterior.report().summary["outputs"].endswith("found by itself") == (output is None)
    assert again.history.output.guessed == (output is None)
    assert "outputs" not in expected_posterior.report().summary


@pytest.mark.filterwarnings("ignore:The posterior's prior precision", "ignore:.*steps at inclusion_lr")
@pytest.mark.parametrize("method", ["diag", "inf", "utvi", "latent_binary"])
def test_all_layers_through_a_function(method: str) -> None:
    """Also trainings take the function, in every pass."""
    options: Any = {
        "method": short(method),
        "likelihood": "regression",
        "noise_variance": 0.5,
        "progress": False,
    }
    data = [(_x(), _x(12, 5))]
    model = Several(lambda a, b: {"p": a, "q": b})
    found = uq.fit(model, data, output=lambda returned: returned["p"][:, :3] * 2.0, **options)
    expected = uq.fit(Doubled(), data, **options)
    assert list(found.layers) == ["body", "head"]
    for head in heads_of(found):
        torch.testing.assert_close(
            uq.wrap(model, found, head)(_x(5, 2)).mean, uq.wrap(Doubled(), expected, head)(_x(5, 2)).mean
        )


class Doubled(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :3] * 2.0


def test_update_tune_evaluate_and_export() -> None:
    model, plain = Several(lambda a, b: {"a": a, "b": b}), Plain()
    options: Any = {"method": "diag", "prior_precision": 2.0, "progress": False, "fisher": "exact"}
    first, second = _data()
    with Watch(model):
        found = uq.update(uq.fit(model, [first], output="a", **options), [second], progress=False)
        expected = uq.update(uq.fit(plain, [first], **options), [second], progress=False)
        found, expected = (
            uq.tune(each, [second], progress=False, max_evaluations=4) for each in (found, expected)
        )
        both = uq.fit(plain, [first, second], **options)
        blocks: list[Any] = [found.blocks["head"], both.blocks["head"]]
        torch.testing.assert_close(blocks[0].diagonal, blocks[1].diagonal)
        assert found.prior_precision == pytest.approx(expected.prior_precision, rel=1e-9)
        tables = [
            uq.evaluate({"uq": uq.wrap(network, posterior), "bare": network}, [first], progress=False)
            for network, posterior in ((model, found), (plain, expected))
        ]
        assert str(tables[0]) == str(tables[1])
        found = uq.update(found, [second], remove=True, progress=False)
        exported = exportable(uq.wrap(model, found, "sampling", n_samples=3))
        torch.testing.assert_close(
            exported(_x(4))[0], uq.wrap(model, found, "sampling", n_samples=3)(_x(4)).probs.float()
        )
    assert chosen_in(found.model or model) == OutputChoice.of_part("a")


def test_outputs_without_a_choice() -> None:
    x = torch.zeros(3, 2)
    for returned in (x, {"logits": x, "loss": 3}, SimpleNamespace(logits=x), (x, 3), {"out": x, "aux": -x}):
        assert output_tensor(returned) is x
    for wrong in (None, "text", x.long(), {"p": x}, (), ("text", x)):
        with pytest.raises(PosthocUQError, match=f"returned {type(wrong).__name__}[; ].*'logits'"):
            output_tensor(wrong)


def test_what_can_be_guessed() -> None:
    x = torch.zeros(3, 2)
    assert guessed_choice(x, 3) is None
    assert guessed_choice({"logits": x, "hidden": x}, 3) == OutputChoice.of_part("logits", True)
    assert guessed_choice(
        {"loss": x.sum(), "p": x, "ids": x.long(), "past": (x,)}, 3
    ) == OutputChoice.of_part("p", True)
    assert guessed_choice((x[:2], x), 3) == OutputChoice.of_part(1, True)


def test_files_say_which_part_was_chosen(tmp_path: Path) -> None:
    model = Several(lambda a, b: (a, b))
    posterior = uq.fit(model, _data(), "diag", output=_first, prior_precision=1.0, progress=False)
    assert posterior.report().summary["outputs"] == "_first(...) of what the model returns"
    uq.save(posterior, tmp_path / "f.h5")
    again = uq.load(tmp_path / "f.h5", model, output=_first)
    assert torch.equal(uq.wrap(model, again)(_x(2)).probs, uq.wrap(model, posterior)(_x(2)).probs)
    posterior = uq.fit(model, _data(), "diag", output=0, prior_precision=1.0, progress=False)
    uq.save(posterior, tmp_path / "g.h5")
    assert "[0] of what the model returns" in str(uq.inspect(tmp_path / "g.h5"))


def _first(returned: tuple[Tensor, Tensor]) -> Tensor:
    return returned[0]


def test_a_view_shares_everything_and_changes_nothing() -> None:
    model = Several(lambda a, b: {"out": a, "aux": b})
    with Watch(model):
        view = with_choice(model, OutputChoice.of_part("out"))
        assert torch.equal(view(_x(2)), model(_x(2))["out"])
        assert [id(p) for p in view.parameters()] == [id(p) for p in model.parameters()]
        assert with_choice(view, OutputChoice.of_part("aux")) is view and with_choice(model, None) is model


def _mean_over_positions(returned: dict[str, Tensor]) -> Tensor:
    return returned["out"].mean((2, 3))


def test_segmentation_of_torchvision_as_it_is() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torchvision.models.get_model(
            "lraspp_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=3
        )
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    options: Any = {"layers": ["classifier.high_classifier"], "method": "diag", "prior_precision": 1.0}
    loader = [(images, torch.tensor([0, 2]))]
    with Watch(model):
        posterior = uq.fit(model, loader, output=_mean_over_positions, progress=False, **options)
        mean = uq.wrap(model, posterior, "linearized").distribution(images)[0]
    assert torch.equal(mean, model.eval()(images)["out"].mean((2, 3)))
