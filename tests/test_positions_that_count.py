"""Positions that do not count (ignored labels, weights of 0, padding) count nowhere: in fits, searches, evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.core import Batch, sample_keys
from posthoc_uq.curvature import KeptInputs

CLASSES, VOID = 3, 255


def pixels() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network for images (2, 3, 3) with classes of 2 x 2 pixels, and data with outlines of `VOID`, as bytes."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 2, 2), nn.Tanh(), nn.Conv2d(2, CLASSES, 1)).double().eval()
    x, y = torch.randn(8, 2, 3, 3, dtype=torch.float64), torch.randint(0, CLASSES, (8, 2, 2))
    y[0, 0], y[3, 1, 1] = VOID, VOID
    return model, x, y.to(torch.uint8)


def both(labels: Tensor) -> list[tuple[uq.Categorical, Tensor]]:
    """The same labels with 255 and with -100 where they do not count."""
    plain = labels.long()
    return [
        (uq.Categorical(ignore_index=VOID), labels),
        (uq.Categorical(), plain.masked_fill(plain == VOID, -100)),
    ]


@pytest.mark.parametrize(
    "fisher", [*(pytest.param(kind, marks=pytest.mark.study) for kind in ("empirical", "exact")), "mc"]
)
def test_any_label_can_be_ignored(fisher: str, tmp_path: Path) -> None:
    model, x, y = pixels()
    found = []
    for likelihood, labels in both(y):
        loader = list(zip(x.split(4), labels.split(4), strict=True))
        options = {"fisher": fisher, "likelihood": likelihood, "progress": False}
        posterior = uq.fit(model, loader, "diag", prior_precision=2.0, dtype=torch.float64, **options)
        uq.save(posterior, tmp_path / "p.h5")
        posterior = uq.load(tmp_path / "p.h5", model)
        assert posterior.likelihood.layout == likelihood.layout
        posterior = uq.tune(posterior, loader, progress=False, max_evaluations=3)
        trials = posterior.history.trials
        evaluation = uq.evaluate(uq.wrap(model, posterior), loader, progress=False)
        found.append(
            [b.diagonal for b in posterior.blocks.values()]
            + [torch.tensor(list(next(iter(evaluation.metrics.values())).values()))]
            + [torch.tensor([posterior.prior_precision, posterior.temperature, trials.model_alone])]
        )
    for given, expected in zip(*found, strict=True):
        torch.testing.assert_close(given, expected)


def test_a_class_can_be_ignored() -> None:
    """As `torch.nn.CrossEntropyLoss(ignore_index=0)` does it."""
    model, x, y = pixels()
    labels = y.long().masked_fill(y == VOID, 0)
    loss = nn.CrossEntropyLoss(ignore_index=0, reduction="sum")(model(x), labels)
    found = uq.Categorical(ignore_index=0).log_prob(model(x), labels).sum()
    torch.testing.assert_close(found, -loss)


def test_a_weight_of_zero_ignores_a_byte() -> None:
    model, x, y = pixels()
    data = [(x, y.masked_fill(y == VOID, 1), (y != VOID))]
    options = {"fisher": "empirical", "prior_precision": 2.0, "progress": False, "dtype": torch.float64}
    masked = uq.fit(model, data, "diag", batch_to_weights=lambda batch: batch[2], **options)
    ignored = uq.fit(model, [(x, y)], "diag", likelihood=uq.Categorical(ignore_index=VOID), **options)
    for name, block in masked.blocks.items():
        torch.testing.assert_close(block.diagonal, ignored.blocks[name].diagonal)


def tokens(samples: int = 8, length: int = 4) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network of tokens (length, 3) that looks at each by itself, and data with labels of which some are ignored."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, CLASSES)).double().eval()
    x, y = torch.randn(samples, length, 3, dtype=torch.float64), torch.randint(0, CLASSES, (samples, length))
    y[0, 1:], y[3] = -100, -100
    return model, x, y


def test_the_nll_is_a_mean_over_labels_everywhere() -> None:
    model, x, y = tokens()
    likelihood, loader = uq.Categorical(class_dim=-1), list(zip(x.split(3), y.split(3), strict=True))
    counted, outputs = y != -100, model(x).detach()
    truth = -torch.distributions.Categorical(logits=outputs[counted]).log_prob(y[counted]).mean()
    posterior = uq.fit(model, loader, "diag", likelihood=likelihood, prior_precision=2.0, progress=False)
    posterior = uq.tune(posterior, loader, parameters=(), progress=False)
    trials = posterior.history.trials
    predictors = {"alone": model, "posterior": uq.wrap(model, posterior)}
    measured = uq.evaluate(predictors, loader, progress=False).metrics
    assert trials.model_alone == pytest.approx(float(truth)) == pytest.approx(measured["alone"]["nll"])
    assert trials.chosen.objective == pytest.approx(measured["posterior"]["nll"])
    options = {"likelihood": likelihood, "val_loader": loader, "progress": False}
    with pytest.warns(UserWarning, match="inclusion_lr"):
        trained = uq.fit(model, loader, "latent_binary", epochs=1, **options)
    assert abs(trained.history.fit["validation NLL"][0] - float(truth)) < 0.2
    with pytest.raises(uq.PosthocUQError, match="No sample or position counts"):
        uq.tune(posterior, [(x, torch.full_like(y, -100))], progress=False)


class Attending(nn.Sequential):
    """A network of tokens that takes an attention mask, as those of transformers do."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


def padded(values: Tensor, value: float, length: int) -> Tensor:
    more = values.new_full((len(values), length - values.shape[1], *values.shape[2:]), value)
    return torch.cat([values, more], 1)


@pytest.mark.parametrize("next_token", [False, True])
@pytest.mark.parametrize("said_by", ["labels", "weights", "attention mask"])
@pytest.mark.covering(1)
def test_padding_does_not_move_the_prior(said_by: str, next_token: bool) -> None:
    """The outputs at a token depend on it alone, so predictions of tokens that count are the same however long."""
    plain, x, _ = tokens(samples=20, length=5)
    model, real = Attending(*plain), torch.arange(5) < torch.randint(2, 6, (20, 1))
    labels = torch.randint(0, CLASSES, (20, 5))
    likelihood, masked = uq.Categorical(class_dim=-1, next_token=next_token), said_by == "attention mask"
    found = []
    for length in (5, 250 if said_by == "weights" else 8):  # 250 * 20 positions are more than are looked at
        inputs, counted, y = padded(x, 0.7, length), padded(real, 0, length), padded(labels, 0, length)
        options = {"likelihood": likelihood, "fisher": "exact" if masked else "empirical", "divergence": 1e-5}
        if said_by == "weights":
            data, options["batch_to_weights"] = [(inputs, y, counted)], lambda batch: batch[2]
        elif masked:
            data = [{"x": inputs, "attention_mask": counted.long()}]
        else:
            data = [(inputs, y.masked_fill(~counted, -100))]
        posterior = uq.fit(model, data, "diag", layers="last", dtype=torch.float64, progress=False, **options)
        values = [posterior.prior_precision]
        if said_by != "weights":
            options = {"criterion": "faithful", "divergence": 1e-4, "temperature": True, "progress": False}
            posterior = uq.tune(posterior, data, **options)
            values += [posterior.prior_precision, posterior.temperature]
        found.append(torch.tensor(values, dtype=torch.float64))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=0)


def test_the_divergence_is_that_of_positions_that_count() -> None:
    """By the definition: the mean over counted positions of KL(network || prediction)."""
    model, x, y = tokens()
    likelihood = uq.Categorical(class_dim=-1)
    posterior = uq.fit(
        model, list(zip(x.split(3), y.split(3), strict=True)), "diag", likelihood=likelihood, progress=False
    )
    network, predicted = model(x).log_softmax(-1), uq.wrap(model, posterior)(x).probs.log()
    divergences = (network.exp() * (network - predicted)).sum(-1)[y != -100].detach()
    assert posterior.history.fit["seconds, faithful prior"] > 0
    assert "faithful prior" in str(posterior.report()).split("seconds: ")[1].split("\n")[0]
    assert posterior.history.faithful.divergence == pytest.approx(float(divergences.mean()), rel=1e-6)


def test_kept_inputs_know_what_counts() -> None:
    x = torch.arange(6.0).reshape(6, 1, 1).expand(6, 3, 2).contiguous()
    y = torch.tensor([[-100, 1, -100]] * 5 + [[-100] * 3])
    x[4], y[4] = x[0], torch.tensor([2, -100, -100])  # the input 0 again, with another label
    likelihood = uq.Categorical(class_dim=-1)
    for order in (range(6), reversed(range(6))):
        kept = KeptInputs(2**20, likelihood)
        for n in order:
            kept.see(Batch((x[n : n + 1],), y[n : n + 1]), sample_keys([x[n : n + 1]], 1, 0))
        (batch,) = kept.batches(torch.device("cpu"))
        places = {
            int(own[0, 0]): weights.tolist()
            for own, weights in zip(batch.args[0], batch.weights, strict=True)
        }
        assert places == {0: [1, 1, 0], 1: [0, 1, 0], 2: [0, 1, 0], 3: [0, 1, 0]}  # the last has no label
    with pytest.raises(uq.PosthocUQError, match="No sample or position counts"):
        posterior = uq.fit(
            tokens()[0], [(tokens()[1], tokens()[2])], "diag", likelihood=likelihood, progress=False
        )
        uq.tune(posterior, [(tokens()[1], torch.full((8, 4), -100))], criterion="faithful", progress=False)


@pytest.mark.parametrize("said_by", ["labels", "attention mask"])
def test_padding_does_not_move_an_evaluation(said_by: str) -> None:
    plain, x, _ = tokens(samples=20, length=5)
    model, real = Attending(*plain), torch.arange(5) < torch.randint(1, 6, (20, 1))
    y = torch.randint(0, CLASSES, (20, 5)).masked_fill(~real, -100)
    likelihood = uq.Categorical(class_dim=-1)
    posterior = uq.fit(
        model, [(x, y)], "diag", likelihood=likelihood, prior_precision=2.0, layers="last", progress=False
    )
    predictor, found = uq.wrap(model, posterior), []
    for length in (5, 9):
        inputs, labels, mask = padded(x, 3.0, length), padded(y, -100, length), padded(real, 0, length).long()
        foreign = (
            [(inputs + 1, labels)] if said_by == "labels" else [{"x": inputs + 1, "attention_mask": mask}]
        )
        evaluation = uq.evaluate(
            predictor, [(inputs, labels)], ood_loaders={"other": foreign}, progress=False
        )
        threshold = evaluation.threshold(0.2, "entropy")
        of_scores = {
            **next(iter(evaluation.foreign.values()))["other"],
            **next(iter(evaluation.selective.values())),
        }
        found.append(
            {"threshold": threshold} | {name: sum(values.values()) for name, values in of_scores.items()}
        )
        entropy = predictor(x).entropy()
        truth = torch.stack([own[counts].mean() for own, counts in zip(entropy, real, strict=True)])
    assert found[0] == pytest.approx(found[1], rel=1e-4) and len(found[0]) > 3
    assert found[0]["threshold"] == pytest.approx(float(truth.sort(descending=True).values[4]), rel=1e-5)
