"""Novelty over layers, of networks whose layers have positions, against its definition in float64 numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from novelty_by_definition import over_layers, pooled, with_one
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.posteriors import FeatureGrams


class Pictures(nn.Module):
    """Five convolutions, the first, the middle and the last of which are stages."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 5, 3), nn.Conv2d(5, 4, 3, stride=2)
        self.three, self.four = nn.Conv2d(4, 6, 1), nn.Conv2d(6, 6, 2)
        self.five, self.last = nn.Conv2d(6, 5, 2), nn.Linear(5, 3)

    def inputs(self, x: Tensor) -> list[Tensor]:
        """What enters the last layer, and the first, the middle and the last convolution."""
        three = torch.tanh(self.two(torch.tanh(self.one(x))))
        five = torch.tanh(self.four(torch.tanh(self.three(three))))
        return [torch.tanh(self.five(five)).mean((2, 3)), x, three, five]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inputs(x)[0])


class Words(nn.Module):
    """Tokens (samples, length, 4); queries and keys get the same tensor, and one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.twice = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 5)
        self.hidden, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def inputs(self, x: Tensor, mask: Tensor) -> list[Tensor]:
        attention = (self.query(x) @ self.key(x).transpose(1, 2)).masked_fill(mask[:, None] == 0, -torch.inf)
        values = torch.tanh(self.twice(torch.tanh(self.twice(attention.softmax(2) @ self.key(x)))))
        shares = mask / mask.sum(1, keepdim=True)
        return [(torch.tanh(self.hidden(values)) * shares.unsqueeze(2)).sum(1), x, values]

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.last(self.inputs(x, attention_mask)[0])


def made(kind: Callable[[], nn.Module]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind().double().eval()
        for parameter in model.parameters():  # classes of some inputs each
            parameter.requires_grad_(False).mul_(2)
        model.last.bias.zero_()  # type: ignore[union-attr, operator]
    return model


def pictures(samples: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 2, 12, 11, generator=generator, dtype=torch.float64) * 1.5


def rows_of_pictures(model: Any, x: Tensor) -> list[np.ndarray]:
    last, *others = model.inputs(x)
    return [with_one(last), *(pooled(each.numpy(), 1, rough=n == 0) for n, each in enumerate(others))]


def fitted(model: nn.Module, x: Tensor, batch: int = 40, **options: Any) -> uq.Posterior:
    y = model(x).argmax(1)
    options = {"method": "diag", "prior_precision": 1.0, "progress": False, "layers": "last"} | options
    return uq.fit(model, list(zip(x.split(batch), y.split(batch), strict=True)), **options)


def close(found: Tensor, wanted: np.ndarray, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), torch.from_numpy(wanted), rtol=rtol, atol=0)


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("head", ["linearized", "moments", "sampling"])
def test_pictures(head: str, layers: str, tmp_path: Path) -> None:
    model, x, test = made(Pictures), pictures(160, 1), torch.cat([pictures(10, 2), 2 * pictures(5, 3)])
    posterior = fitted(model, x, layers=layers, unsupported="skip")
    wanted = over_layers(
        rows_of_pictures(model, x), model(x).argmax(1).numpy(), rows_of_pictures(model, test)
    )
    predictor = uq.wrap(model, posterior, head)
    of_last = predictor.novelty(test, of="class")
    for found in (predictor.novelty(test), predictor(test).novelty(), predictor.predict([test]).novelty()):
        close(found, wanted)
        assert bool((found >= of_last).all()) and bool((found > of_last).any()) and bool((found < 1).all())
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model, untrusted=True)
    close(uq.wrap(model, loaded, head)(test).novelty(), wanted)
    described = uq.inspect(tmp_path / "p.h5")["features"]["stages"]
    assert [(stage["layer"]["name"], stage["source"]) for stage in described] == [
        *(("one", "roughness"), ("three", "deviation"), ("five", "deviation"))
    ]
    assert "also by what enters 'one' (mean, deviation and roughness" in str(loaded.report())
    assert not any(vars(m)["_forward_pre_hooks"] or vars(m)["_forward_hooks"] for m in model.modules())


@pytest.mark.parametrize("head", ["linearized", "moments", "sampling"])
def test_words_leave_out_padding(head: str) -> None:
    model, generator = made(Words), torch.Generator().manual_seed(1)
    x = torch.randn(120, 6, 4, generator=generator, dtype=torch.float64)
    mask = (torch.arange(6) < torch.randint(2, 7, (120, 1), generator=generator)).double()
    y = model(x, mask).argmax(1)
    data = [
        {"x": x[n : n + 40], "attention_mask": mask[n : n + 40], "labels": y[n : n + 40]} for n in (0, 40, 80)
    ]
    posterior = uq.fit(model, data, "diag", layers="last", prior_precision=1.0, progress=False)
    assert posterior.features is not None
    assert [stage.layer.name for stage in posterior.features.stages] == ["query", "hidden"]

    def rows(x: Tensor, mask: Tensor) -> list[np.ndarray]:
        last, *others = model.inputs(x, mask)
        return [with_one(last), *(pooled(each.numpy(), 2, mask.numpy()) for each in others)]

    test, own = 2 * x[:9].flip(0), mask[:9].flip(0)
    wanted = over_layers(rows(x, mask), y.numpy(), rows(test, own))
    predictor = uq.wrap(model, posterior, head)
    close(predictor(test, attention_mask=own).novelty(), wanted)
    longer = predictor(F.pad(test, (0, 0, 0, 3), value=7.0), attention_mask=F.pad(own, (0, 3)))
    close(longer.novelty(), wanted)


def test_neither_batches_nor_order_nor_copies_matter() -> None:
    model, x, test = made(Pictures), pictures(700, 1), pictures(9, 2)
    reference = uq.wrap(model, fitted(model, x)).novelty(test)
    order = torch.randperm(700, generator=torch.Generator().manual_seed(0))
    other = uq.wrap(model, fitted(model, x[order], batch=33)).novelty(test)
    torch.testing.assert_close(other, reference, rtol=1e-6, atol=0)
    twice = fitted(
        model, torch.cat([x, x])
    )  # the Grams are twice as large, and the ratios of new inputs the same
    assert twice.features is not None
    of_last = uq.wrap(model, twice).novelty(test, of="class")
    torch.testing.assert_close(of_last, uq.wrap(model, fitted(model, x)).novelty(test, of="class"))


def test_what_weighs_nothing_is_not_there() -> None:
    model, x, test = made(Pictures), pictures(120, 1), pictures(9, 2)
    weights, y = (torch.arange(120) < 90).double(), model(x).argmax(1)
    options: dict[str, Any] = {"layers": "last", "prior_precision": 1.0, "progress": False}
    batches = [
        {"x": x[n : n + 40], "labels": y[n : n + 40], "weights": weights[n : n + 40]} for n in (0, 40, 80)
    ]
    weighed = uq.fit(
        model,
        batches,
        "diag",
        batch_to_weights=lambda batch: batch["weights"],
        batch_to_inputs=lambda batch: batch["x"],
        batch_to_targets=lambda batch: batch["labels"],
        **options,
    )
    found = uq.wrap(model, weighed).novelty(test)
    torch.testing.assert_close(found, uq.wrap(model, fitted(model, x[:90])).novelty(test), rtol=1e-6, atol=0)


def test_half_formats_and_cuts_of_the_network_give_the_same(tmp_path: Path) -> None:
    model, x, test = made(Pictures), pictures(160, 1), pictures(9, 2)
    posterior = fitted(model, x)
    wanted = uq.wrap(model, posterior).novelty(test).log()
    uq.save(posterior, tmp_path / "p.h5", dtype=torch.bfloat16)
    found = uq.wrap(model, uq.load(tmp_path / "p.h5", model)).novelty(test).log()
    assert (found - wanted).abs().max() < 0.15


def test_a_stage_that_nothing_changes_is_no_oracle() -> None:
    """Rounding of what is constant in training must not look foreign."""
    model, x = made(Pictures), pictures(1, 1).expand(60, -1, -1, -1) + 1e-9 * pictures(60, 5)
    x = torch.cat([x, x + 1e-9])
    features = fitted(model, x).features
    assert features is not None and bool((torch.stack([s.scale[-1] for s in features.stages]) >= 0.05).all())
    novelty = uq.wrap(model, fitted(model, x)).novelty(x[:1] + 1e-9)
    assert float(novelty) < 0.01


def test_positions_that_come_first_are_no_stage() -> None:
    """Also where there are as many as samples in the comparison: the last layer keeps its novelty."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.enter(x.transpose(0, 1))).mean(0))

    torch.manual_seed(0)
    for length in (2, 3):
        features = fitted(First(), torch.randn(40, length, 3)).features
        assert features is not None and features.layer.name == "last" and not features.stages


def test_positions_that_a_mask_is_not_of_are_no_stage() -> None:
    """They would see the padding, here by every second position alone."""

    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.inner, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, inputs: Tensor, attention_mask: Tensor) -> Tensor:
            halved = torch.tanh(self.inner(torch.tanh(self.enter(inputs))[:, ::2]))
            mask = attention_mask[:, ::2, None]
            return self.last((halved * mask).sum(1) / mask.sum(1))

    torch.manual_seed(0)
    x, mask = torch.randn(60, 6, 4), (torch.arange(6) < torch.randint(2, 7, (60, 1))).float()
    model = Halved()
    batch = {"inputs": x, "attention_mask": mask, "labels": torch.arange(60) % 3}
    posterior = uq.fit(model, [batch], prior_precision=1.0, progress=False)
    assert posterior.features is not None
    assert [stage.layer.name for stage in posterior.features.stages] == ["enter"]
    predictor = uq.wrap(model, posterior)
    padded = predictor.novelty(inputs=F.pad(x, (0, 0, 0, 6)), attention_mask=F.pad(mask, (0, 6)))
    assert torch.allclose(padded, predictor.novelty(inputs=x, attention_mask=mask))


def test_numbers_that_are_not_finite_are_not_hidden_by_other_layers() -> None:
    model, x = made(Pictures), pictures(160, 1)
    features = fitted(model, x).features
    assert features is not None
    rows = torch.zeros(2, sum(features.columns), dtype=torch.float64)
    rows[0, -2] = torch.nan
    found = features.over_layers(rows)
    assert bool(found[0].isnan()) and found[1] == 1


def test_of_many_channels_there_is_less_to_tell() -> None:
    wide = nn.Sequential(
        *(nn.Conv1d(600, 4, 1), nn.ReLU(), nn.Conv1d(4, 1100, 1), nn.ReLU(), nn.Conv1d(1100, 4, 2)),
        *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)),
    )
    posterior = fitted(wide.eval(), torch.randn(60, 600, 5, generator=torch.Generator().manual_seed(0)))
    assert isinstance(posterior.features, FeatureGrams)
    told = [(stage.layer.name, stage.source, stage.classes) for stage in posterior.features.stages]
    assert told[0] == ("0", "mean", 1) and ("4", "mean", 1) not in told and told[-1][0] == "2"
    assert posterior.features.bytes() < 2**22


def test_smoothing_is_of_the_last_layer() -> None:
    model, x = made(Pictures), pictures(60, 1)
    predictor = uq.wrap(model, fitted(model, x))
    with pytest.raises(uq.PosthocUQError, match="of='class', smoothing"):
        predictor.novelty(x[:3], smoothing=1e-2)


class Map(nn.Module):
    """A small network of pixels, whose first layer sees more of them than the last, and is no stage."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.enter, self.coarse = nn.Conv2d(2, 4, 2, stride=2), nn.Conv2d(4, 5, 2, stride=2)
        self.deep = nn.Conv2d(5, 5, 1) if deep else nn.Identity()
        self.inner, self.last = nn.Conv2d(9, 6, 1), nn.Conv2d(6, 3, 1)

    def inputs(self, x: Tensor) -> list[Tensor]:
        """What enters the last layer, the two stages on its grid, and what is half as fine."""
        fine = torch.tanh(self.enter(x))
        half = torch.tanh(self.coarse(fine))
        both = torch.cat([fine, F.interpolate(self.deep(half), size=fine.shape[2:])], 1)
        return [torch.tanh(self.inner(both)), fine, both, half]

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.last(self.inputs(x)[0]), size=x.shape[2:])


def map_rows(model: Map, x: Tensor) -> list[np.ndarray]:
    return [with_one(each.movedim(1, -1).flatten(0, 2)) for each in model.inputs(x)]


@pytest.mark.parametrize("head", ["linearized", "moments"])
def test_pixels(head: str, tmp_path: Path) -> None:
    """Of fewer pixels than are kept all are left out, so that the definition holds exactly."""
    model = made(lambda: Map(deep=False))
    x, test = pictures(10, 1), torch.cat([pictures(3, 2), 2 * pictures(2, 3)])
    posterior = fitted(model, x, batch=4)
    assert posterior.features is not None
    told = [(stage.layer.name, stage.source) for stage in posterior.features.stages]
    assert told == [("coarse", "pixels"), ("inner", "pixels")]
    classes = model.last(model.inputs(x)[0]).argmax(1).flatten().numpy()
    wanted = over_layers(map_rows(model, x)[:3], classes, map_rows(model, test)[:3]).reshape(5, 6, 5)
    predictor = uq.wrap(model, posterior, head)
    found = predictor.novelty(test)
    close(found, wanted)
    assert bool((found >= predictor.novelty(test, of="class")).all())
    enlarged = F.interpolate(torch.from_numpy(wanted).unsqueeze(1), size=(12, 11)).squeeze(1)
    close(predictor(test).novelty(), enlarged.numpy())
    uq.save(posterior, tmp_path / "p.h5")
    loaded = uq.load(tmp_path / "p.h5", model, untrusted=True)
    close(uq.wrap(model, loaded, head).novelty(test), wanted)
    assert "'coarse' (each pixel)" in str(loaded.report())


def test_a_pixel_of_a_coarse_stage_counts_by_the_classes_that_it_covers() -> None:
    model, x, test = made(lambda: Map(deep=True)), pictures(40, 1)[..., :8], pictures(3, 2)[..., :8]
    features = fitted(model, x, batch=4).features
    assert features is not None and [stage.layer.name for stage in features.stages][1] == "deep"
    half = map_rows(model, x)[3]
    of_pixels = model(x).argmax(1).reshape(40, 3, 4, 2, 4).permute(0, 1, 3, 2, 4).reshape(-1, 16)
    own = torch.from_numpy(map_rows(model, test)[3])
    shares = []
    for label in range(3):
        often = (of_pixels == label).double().mean(1)
        gram = torch.from_numpy(half.T) * often @ torch.from_numpy(half)
        ridge = 3e-4 * gram.trace() / len(gram)
        inverse = (gram + ridge * torch.eye(len(gram))).inverse()
        shares.append(ridge * torch.einsum("si,ij,sj->s", own, inverse, own) / own.square().sum(1))
    truth = torch.stack(shares).amin(0)
    close(features.stages[1].novelty(own), truth.numpy())
    rows = [torch.from_numpy(each) for each in map_rows(model, test)]
    wide = truth.reshape(3, 3, 2).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten()
    first, third = (features.stages[place].novelty(rows[1 + place // 2]) for place in (0, 2))
    ratios = [features.novelty(rows[0]), first, wide, third]
    found = uq.wrap(model, fitted(model, x, batch=4)).novelty(test)
    close(found.flatten(), features.joined(ratios).numpy())
