"""Soft labels: probabilities in place of labels, of classes, of positions, and of single logits, against torch's own
losses, dense matrices by autograd, and expectations over labels that are written out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import run, run_json
from networks import inputs_of, mlp
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.evaluation import metrics
from posthoc_uq.likelihoods import Likelihood

SAMPLES, TAU = 12, 3.0


class Pixels(nn.Module):
    """Logits of three classes at each of 2 x 3 positions, in dimension 1 or at the end."""

    def __init__(self, class_dim: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Conv2d(2, 3, 1).double()
        self.class_dim = class_dim

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).movedim(1, self.class_dim)


def case(name: str) -> tuple[nn.Module, Tensor, Tensor, Any, Any]:
    """Model, inputs, soft labels, the likelihood, and torch's loss of each sample."""
    if name.startswith("pixels"):
        class_dim = 1 if name == "pixels" else -1
        x = inputs_of(2, 2, 3, samples=SAMPLES, dtype=torch.float64)
        soft = (2 * inputs_of(3, 2, 3, samples=SAMPLES, seed=8, dtype=torch.float64)).softmax(1)
        soft[:3, :, 0, 0] = 0  # which do not count

        def of_pixels(outputs: Tensor, targets: Tensor) -> Tensor:
            logits, shares = (each.movedim(class_dim, 1) for each in (outputs, targets))
            return nn.functional.cross_entropy(logits, shares, reduction="none").flatten(1).sum(1)

        likelihood = uq.Categorical(class_dim=class_dim)
        return Pixels(class_dim), x, soft.movedim(1, class_dim), likelihood, of_pixels
    outputs, x = {"binary": 1, "multilabel": 3}[name], inputs_of(4, samples=SAMPLES, dtype=torch.float64)
    soft = inputs_of(outputs, samples=SAMPLES, seed=8, dtype=torch.float64).sigmoid()

    def of_logits(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits
        return loss(outputs, targets.reshape(outputs.shape), reduction="none").sum(1)

    soft = soft.squeeze(1) if outputs == 1 else soft
    likelihood = {"binary": uq.Bernoulli, "multilabel": uq.Multilabel}[name]()
    return mlp(outputs, dtype=torch.float64), x, soft, likelihood, of_logits


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """``(samples, outputs, weights)``, each layer's bias as its last column."""
    rows, parameters = [], list(model.parameters())
    for outputs in model(x):
        for output in outputs.flatten():
            own = torch.autograd.grad(output, parameters, retain_graph=True)
            pairs = zip(own[::2], own[1::2], strict=True)
            rows.append(torch.cat([torch.cat([w.flatten(1), b[:, None]], 1).flatten() for w, b in pairs]))
    return torch.stack(rows).unflatten(0, (len(x), -1))


CASE = pytest.mark.parametrize("name", ["pixels", "pixels at the end", "binary", "multilabel"])


@CASE
def test_fits_by_the_definition(name: str) -> None:
    model, x, soft, likelihood, loss = case(name)
    outputs = model(x).detach()
    torch.testing.assert_close(likelihood.log_prob(outputs, soft), -loss(outputs, soft))
    score = Likelihood.score(likelihood, outputs, soft)
    torch.testing.assert_close(likelihood.score(outputs, soft), score)
    options = {"likelihood": likelihood, "prior_precision": TAU, "progress": False}
    empirical = uq.fit(model, [(x[:5], soft[:5]), (x[5:], soft[5:])], "full", fisher="empirical", **options)
    gradients = torch.einsum("nk,nkp->np", score.flatten(1), jacobian(model, x))
    fisher = gradients.T @ gradients / SAMPLES
    torch.testing.assert_close(empirical.blocks["joint"].fisher, fisher, rtol=1e-6, atol=1e-9)
    assert empirical.evidence.log_likelihood == pytest.approx(-float(loss(outputs, soft).sum()))
    # the expectation over labels is the model's own, but for positions that do not count
    exact = uq.fit(model, [(x, soft)], "full", fisher="exact", **options)
    if name.startswith("pixels"):
        dim = likelihood.layout.class_dim
        hard = soft.argmax(dim).masked_fill(soft.sum(dim) == 0, -100)
    else:
        hard = (soft > 0.5).long()
    same = uq.fit(model, [(x, hard)], "full", fisher="exact", **options)
    assert torch.equal(exact.blocks["joint"].fisher, same.blocks["joint"].fisher)


def test_weights_of_positions_and_the_dimension_of_classes() -> None:
    model, x, soft, _, _ = case("pixels at the end")
    options = {"prior_precision": TAU, "progress": False, "fisher": "empirical"}
    known = uq.fit(model, [(x, soft)], "full", likelihood=uq.Categorical(class_dim=-1), **options)
    found = uq.fit(model, [(x, soft)], "full", **options)  # by the sums of the labels
    assert found.likelihood.layout.class_dim == -1
    assert torch.equal(found.blocks["joint"].fisher, known.blocks["joint"].fisher)
    whole = soft.clone()
    whole[:3, 0, 0] = 1 / 3
    mask = (soft.sum(-1) > 0).double()
    masked = uq.fit(model, [(x, whole, mask)], "full", batch_to_weights=lambda batch: batch[2], **options)
    torch.testing.assert_close(masked.blocks["joint"].fisher, known.blocks["joint"].fisher)
    assert masked.evidence.log_likelihood == pytest.approx(known.evidence.log_likelihood)


def gap(confidence: Tensor, shares: Tensor, bins: int = 15) -> float:
    """The calibration error of equal bins, by loops."""
    places = (confidence * bins).long().clamp(max=bins - 1)
    return sum(abs(float((shares - confidence)[places == b].sum())) for b in range(bins)) / len(confidence)


@CASE
def test_predictions_are_rated_by_the_expectation_over_labels(name: str, tmp_path: Path) -> None:
    model, x, soft, likelihood, loss = case(name)
    posterior = uq.fit(model, [(x, soft)], "kfac", likelihood=likelihood, prior_precision=TAU, progress=False)
    uq.save(posterior, tmp_path / "p.h5")
    predictor = uq.wrap(model, uq.load(tmp_path / "p.h5", model))
    prediction = predictor(x)
    quality = uq.evaluate(predictor, [(x[:5], soft[:5]), (x[5:], soft[5:])], progress=False)
    measures = quality.metrics["linearized"]
    if name.startswith("pixels"):
        dim = likelihood.layout.class_dim
        probs, shares = (each.movedim(dim, -1).reshape(-1, 3) for each in (prediction.probs, soft))
        counted = shares.sum(1) > 0
        probs, shares = probs[counted], shares[counted]
        logs = (soft * prediction.probs.log()).flatten(1).sum(1)
    elif name == "binary":
        probs, shares = prediction.probs, torch.stack([1 - soft, soft], 1)
        logs = (shares * probs.log()).sum(1)
    else:
        probs, shares = prediction.probs, soft
        logs = (shares * probs.log() + (1 - shares) * (1 - probs).log()).sum(1)
    torch.testing.assert_close(prediction.log_prob(soft), logs, rtol=1e-5, atol=1e-6)
    assert measures["nll"] == pytest.approx(
        -float(logs.sum()) / (len(probs) if name.startswith("pixels") else SAMPLES), rel=1e-5
    )
    squares = (probs - shares).square()
    if name == "multilabel":
        assert measures["brier"] == pytest.approx(float(squares.mean()), rel=1e-5)
        assert measures["ece"] == pytest.approx(gap(probs.flatten(), shares.flatten()), rel=1e-4)
        wrong = ((probs > 0.5) != (shares > 0.5)).double().mean()
        assert measures["hamming_loss"] == pytest.approx(float(wrong))
    else:
        assert measures["brier"] == pytest.approx(float(squares.sum(1).mean()), rel=1e-5)
        top = probs.max(1)
        own = shares.gather(1, top.indices.unsqueeze(1)).squeeze(1)
        assert measures["ece"] == pytest.approx(gap(top.values, own), rel=1e-4)
        assert measures["accuracy"] == pytest.approx(float((top.indices == shares.argmax(1)).double().mean()))
    assert quality.figures()
    # held-out data are rated likewise, and choose a temperature
    tuned = uq.tune(posterior, [(x, soft)], max_evaluations=2, progress=False)
    labels = len(probs) if name.startswith("pixels") else SAMPLES
    assert tuned.history.trials.model_alone == pytest.approx(
        float(loss(model(x).detach(), soft).sum()) / labels
    )


def test_soft_labels_that_are_whole_promise_as_labels_do_and_others_not() -> None:
    x, generator = inputs_of(4, samples=80), torch.Generator().manual_seed(0)
    model, labels = mlp(3), torch.randint(3, (80,), generator=generator)
    one_hot = nn.functional.one_hot(labels, 3).float()
    posterior = uq.fit(model, [(x, labels)], "kfac", prior_precision=TAU, progress=False)
    tuned = uq.tune(posterior, [(x, labels)], max_evaluations=1, parameters=(), progress=False)
    kept = [uq.calibrate(tuned, [(x, y)], share=None, progress=False) for y in (labels, one_hot)]
    scores = [each.history.promises.targets.scores[0] for each in kept]
    torch.testing.assert_close(scores[0].values, scores[1].values)
    sentence = "A promise is about labels, and some of these targets are probabilities"
    smoothed = 0.9 * one_hot + 0.1 / 3
    with pytest.raises(uq.PosthocUQError, match=re.escape(sentence)):
        uq.calibrate(posterior, [(x, smoothed)], progress=False)
    # the way out that it names
    again = uq.calibrate(
        tuned, [(x, smoothed)], share=None, batch_to_targets=lambda batch: batch[1].argmax(1), progress=False
    )
    torch.testing.assert_close(again.history.promises.targets.scores[0].values, scores[0].values)
    # new data with soft labels: sets are counted for the most probable class
    measures = [
        uq.evaluate(uq.wrap(model, again), [(x, y)], progress=False).promised["linearized"]
        for y in (labels, smoothed)
    ]
    assert measures[0]["observed_coverage_90"] == measures[1]["observed_coverage_90"]
    for name in ("pixels", "binary", "multilabel"):
        model, x, soft, likelihood, _ = case(name)
        posterior = uq.fit(
            model, [(x, soft)], "diag", likelihood=likelihood, prior_precision=TAU, progress=False
        )
        with pytest.raises(uq.PosthocUQError, match="A promise is about labels"):
            uq.calibrate(posterior, [(x, soft)], progress=False)
    with pytest.raises(uq.PosthocUQError, match="class_rates need one whole number"):
        model, x, soft, likelihood, _ = case("binary")
        posterior = uq.fit(
            model, [(x, soft)], "diag", likelihood=likelihood, prior_precision=TAU, progress=False
        )
        uq.calibrate(posterior, [(x, soft)], class_rates=[0.5, 0.5], progress=False)


def test_shifts_of_one_logit_by_soft_labels_are_those_by_labels() -> None:
    """Four copies of a sample with the share k / 4 are as probable as k samples with the label 1 and 4 - k with 0."""
    x, model = inputs_of(4, samples=100), mlp(1)
    wanted = (model(x).detach() + 2).sigmoid().flatten()  # class 1 is more frequent than predicted
    soft, repeated = (4 * wanted).round() / 4, torch.cat([x] * 4)
    labels = torch.cat([(soft > k / 4).float() for k in range(4)])
    posterior = uq.fit(model, [(x, soft)], "kfac", likelihood="binary", prior_precision=100.0, progress=False)
    options: Any = {"scaling": "bias", "parameters": (), "progress": False}
    found, by_labels = (
        uq.tune(posterior, [(repeated, y)], **options) for y in (torch.cat([soft] * 4), labels)
    )
    assert found.class_shift[0] == pytest.approx(by_labels.class_shift[0], rel=1e-3)
    assert found.class_shift[0] > 1
    assert found.temperature == pytest.approx(by_labels.temperature, rel=1e-3)


def test_soft_labels_of_one_logit_say_nothing_of_accuracy() -> None:
    """A gap between confidence and accuracy moves the network's temperature, and soft labels have no accuracy."""
    x, model = inputs_of(4, samples=100), mlp(1)
    y = (model(x).detach().flatten() > 0).float()
    hard = uq.fit(model, [(x, y)], likelihood="binary", progress=False)
    soft = uq.fit(model, [(x, 0.998 * y + 0.001)], likelihood="binary", progress=False)
    assert hard.temperature < 0.99 and soft.temperature == 1
    with pytest.raises(uq.PosthocUQError, match="soft ones of shape"):
        uq.fit(model, [(x, 0.9 * y)], "message_passing", likelihood="binary", progress=False)


def test_leave_one_out_regresses_on_the_probabilities() -> None:
    """Targets of 0.1 and 0.9 are those of 0 and 1, of 0.8 of the size."""
    x, model = inputs_of(4, samples=40), mlp(1)
    first = (x[:, 0] > 0).float()
    posterior = uq.fit(model, [(x, first)], "kfac", likelihood="binary", prior_precision=1.0, progress=False)
    found = uq.tune(posterior, [(x, 0.8 * first + 0.1)], criterion="leave_one_out", progress=False)
    hard = uq.tune(posterior, [(x, first)], criterion="leave_one_out", progress=False)
    # a centred target of .8 of the size has the same left-out decisions, and a larger temperature
    assert found.history.leave_one_out.accuracy == pytest.approx(hard.history.leave_one_out.accuracy)
    assert found.temperature >= hard.temperature


@pytest.mark.parametrize("loss", [metrics.expected_calibration_error, metrics.classwise_calibration_error])
def test_calibration_errors_of_one_hot_labels_are_those_of_labels(loss: Any) -> None:
    probs = inputs_of(5, samples=90, dtype=torch.float64).softmax(1)
    labels = torch.arange(90) % 5
    one_hot = nn.functional.one_hot(labels, 5).double()
    for binning in ("equal_width", "equal_mass"):
        assert loss(probs, one_hot, binning=binning) == pytest.approx(loss(probs, labels, binning=binning))
    assert loss(probs, probs) == pytest.approx(0, abs=1e-12)  # a teacher that is right


def test_a_table_of_probabilities(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def one():\n    torch.manual_seed(0)\n    return nn.Linear(2, 1)\n\n"
        "def three():\n    torch.manual_seed(0)\n    return nn.Linear(2, 3)\n"
    )
    x = inputs_of(2, samples=30)
    shares = inputs_of(3, samples=30, seed=3).softmax(1)
    header = "a,b,cat,dog,emu\n"
    rows = [
        ",".join(f"{value:.6f}" for value in (*left, *right)) for left, right in zip(x, shares, strict=True)
    ]
    (tmp_path / "t.csv").write_text(header + "\n".join(rows) + "\n")
    for name, target, likelihood in (
        ("one", "cat", "binary"),
        ("three", "cat,dog,emu", "classification"),
    ):
        model = ["--model", f"{tmp_path / 'nets.py'}:{name}"]
        own = [
            "--columns a,b --method kfac --prior-precision 2",
            "--target",
            target,
            "--likelihood",
            likelihood,
        ]
        run("fit", tmp_path / "t.csv", *model, "-o", tmp_path / f"{name}.h5", *own)
        said = run_json("evaluate", tmp_path / f"{name}.h5", tmp_path / "t.csv", *model)
        torch.manual_seed(0)
        network = nn.Linear(2, {"one": 1, "three": 3}[name])
        read = uq.load(tmp_path / f"{name}.h5", network)
        y = shares[:, 0] if name == "one" else shares
        expected = -float(uq.wrap(network, read)(x).log_prob(y).mean())
        assert said["quality"]["kfac, linearized"]["nll"] == pytest.approx(expected, rel=1e-4)
