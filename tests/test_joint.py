"""Several heads in one posterior, against dense matrices by autograd over all heads."""

from __future__ import annotations

import copy
import math
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import inputs_of
from storage_helpers import edit_state
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

import posthoc_uq as uq
from posthoc_uq.app import Service
from posthoc_uq.core import joined_targets
from posthoc_uq.likelihoods import JointPrediction

SAMPLES, TAU, NOISE = 30, 2.0, 0.3
LIKELIHOOD = uq.Joint(label="classification", value=uq.Gaussian(NOISE))


class Two(nn.Module):
    """Three classes and two values of one body."""

    def __init__(self, form: Any = dict) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
            self.label, self.value = nn.Linear(4, 3).double(), nn.Linear(4, 2).double()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        return self.form(label=self.label(hidden), value=self.value(hidden))


def outputs_of(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x)
    return torch.cat([found["label"], found["value"]], 1)


def data(samples: int = SAMPLES, seed: int = 1) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    model, x = Two(), inputs_of(3, samples=samples, seed=seed, dtype=torch.float64)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = model(x)
        noise = math.sqrt(NOISE) * torch.randn(samples, 2, dtype=torch.float64)
        targets = {
            "label": Categorical(logits=found["label"]).sample(),
            "value": found["value"] + noise,
        }
    return model, x, targets


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """``(samples, outputs, weights)`` by autograd."""
    rows = [
        torch.cat(
            [
                each.flatten() if each is not None else torch.zeros(p.numel(), dtype=torch.float64)
                for each, p in zip(
                    torch.autograd.grad(output, [*model.parameters()], retain_graph=True, allow_unused=True),
                    model.parameters(),
                    strict=True,
                )
            ]
        )
        for output in outputs_of(model, x).flatten()
    ]
    return torch.stack(rows).unflatten(0, (len(x), -1))


def fishers(model: nn.Module, x: Tensor, weights: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """``(samples, outputs, outputs)``: ``diag(p) - p p^T`` of the classes, ``1 / noise`` of the values."""
    probs = model(x)["label"].detach().softmax(1)
    of_classes = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    return torch.stack(
        [torch.block_diag(weights[0] * f, weights[1] * torch.eye(2).double() / NOISE) for f in of_classes]
    )


def precision(model: nn.Module, x: Tensor, weights: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    jacobians = jacobian(model, x)
    ggn = torch.einsum("nka,nkl,nlb->ab", jacobians, fishers(model, x, weights), jacobians)
    return ggn + TAU * torch.eye(len(ggn)).double()


def fit(
    model: nn.Module, loader: Any, method: str = "full", likelihood: Any = LIKELIHOOD, **options: Any
) -> uq.Posterior:
    options = {"fisher": "exact", "layers": "all", "prior_precision": TAU} | options
    return uq.fit(model, loader, method, likelihood=likelihood, progress=False, **options)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 0.5)])
def test_covariance_and_evidence_are_those_of_all_heads(weights: tuple[float, float]) -> None:
    model, x, targets = data()
    likelihood = LIKELIHOOD
    if weights != (1.0, 1.0):
        likelihood = uq.Joint(
            label="classification",
            value=uq.Gaussian(NOISE),
            loss_weights=dict(zip(("label", "value"), weights, strict=True)),
        )
    posterior = fit(model, [(x, targets)], likelihood=likelihood)
    dense, new = precision(model, x, weights), inputs_of(3, samples=5, seed=3, dtype=torch.float64)
    jacobians = jacobian(model, new)
    expected = jacobians @ torch.linalg.inv(dense) @ jacobians.mT
    predictor = uq.wrap(model, posterior)
    torch.testing.assert_close(predictor.functional_covariance(new), expected)
    torch.testing.assert_close(predictor.functional_mean(new), outputs_of(model, new).detach())
    prediction = predictor(new)
    assert isinstance(prediction, JointPrediction) and len(prediction) == 5
    torch.testing.assert_close(prediction.value.epistemic_variance, expected[:, 3:, 3:].diagonal(0, 1, 2))
    torch.testing.assert_close(
        prediction.value.noise_variance, torch.full((5, 2), NOISE, dtype=torch.float64)
    )
    # the head of classes, by many draws of its own Gaussian
    noise = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    root = torch.linalg.cholesky(expected[:, :3, :3])
    draws = outputs_of(model, new)[:, :3].detach() + torch.einsum("nkl,sl->snk", root, noise)
    torch.testing.assert_close(prediction.label.probs, draws.softmax(2).mean(0), rtol=0, atol=2e-3)
    # the evidence
    outputs = model(x)
    of_labels = Categorical(logits=outputs["label"]).log_prob(targets["label"]).sum()
    of_values = Normal(outputs["value"], math.sqrt(NOISE)).log_prob(targets["value"]).sum()
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    evidence = (
        weights[0] * of_labels
        + weights[1] * of_values
        - 0.5 * TAU * theta.square().sum()
        + 0.5 * len(theta) * math.log(TAU)
        - 0.5 * torch.logdet(dense)
    )
    assert float(posterior.log_marginal_likelihood()) == pytest.approx(float(evidence.detach()), rel=1e-9)
    # loss weights are of the training, not of what is predicted
    log_prob = predictor(x).log_prob(targets)
    of_heads = predictor(x).label.log_prob(targets["label"]) + predictor(x).value.log_prob(targets["value"])
    torch.testing.assert_close(log_prob, of_heads)


def test_two_fits_are_wider() -> None:
    """A joint posterior knows the shared weights from the data of both heads."""
    model, x, targets = data()
    new = inputs_of(3, samples=20, seed=3, dtype=torch.float64)
    together = uq.wrap(model, fit(model, [(x, targets)])).functional_variance(new)
    alone = []
    for name, likelihood in (("label", uq.Categorical()), ("value", uq.Gaussian(NOISE))):
        own = fit(model, [(x, targets[name])], likelihood=likelihood, output=name)
        alone.append(uq.wrap(model, own).functional_variance(new))
    ratios = torch.cat(alone, 1) / together
    dense, jacobians = jacobian(model, x), jacobian(model, new)
    for part in (slice(0, 3), slice(3, 5)):
        of_head = torch.einsum(
            "nka,nkl,nlb->ab", dense[:, part], fishers(model, x)[:, part, part], dense[:, part]
        )
        covariance = torch.linalg.inv(of_head + TAU * torch.eye(len(of_head)).double())
        expected = torch.einsum("nka,ab,nkb->nk", jacobians[:, part], covariance, jacobians[:, part])
        torch.testing.assert_close(ratios[:, part], expected / together[:, part])
    assert float(ratios.min()) > 1


@pytest.mark.parametrize("method", ["diag", "kfac", "efb", "inf", "full"])
def test_methods_and_heads(method: str, tmp_path: Path) -> None:
    model, x, targets = data()
    loader = [
        (x[:20], {n: t[:20] for n, t in targets.items()}),
        (x[20:], {n: t[20:] for n, t in targets.items()}),
    ]
    posterior = fit(model, loader, method, layers="last")
    assert [*posterior.layers] == ["label", "value"]
    hidden = torch.cat([model.body(x), torch.ones(SAMPLES, 1).double()], 1).detach()
    if method == "diag":  # of each head's own last layer
        squares = fishers(model, x).diagonal(0, 1, 2).T @ hidden.square() + TAU
        variance = posterior.variance()
        torch.testing.assert_close(variance["label.weight"], 1 / squares[:3, :4])
        torch.testing.assert_close(variance["value.bias"], 1 / squares[3:, 4])
    if method == "full":
        found = uq.wrap(model, posterior).functional_covariance(x[:4])
        last = nn.ModuleList([model.label, model.value])
        jacobians = jacobian(model, x)[:, :, -sum(p.numel() for p in last.parameters()) :]
        ggn = torch.einsum("nka,nkl,nlb->ab", jacobians, fishers(model, x), jacobians)
        covariance = torch.linalg.inv(ggn + TAU * torch.eye(len(ggn)).double())
        torch.testing.assert_close(found, jacobians[:4] @ covariance @ jacobians[:4].mT)
    uq.save(posterior, tmp_path / "p.h5")
    read = uq.load(tmp_path / "p.h5", Two())
    assert read.likelihood.attributes() == {
        "name": "joint",
        "heads": {
            "label": {"name": "classification"},
            "value": {"name": "regression", "noise_variance": [NOISE]},
        },
        "shapes": {"label": [3], "value": [2]},
    }
    for head, options in (("linearized", {}), ("sampling", {"n_samples": 400}), ("moments", {})):
        own = uq.wrap(model, posterior, head, **options)(x[:4])
        again = uq.wrap(model, read, head, **options)(x[:4])
        torch.testing.assert_close(again.label.probs, own.label.probs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(again.value.variance, own.value.variance, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own.value.mean, model(x[:4])["value"].detach(), rtol=0.2, atol=0.2)
        assert bool((own.novelty() > 0).all()) and torch.equal(own.label.novelty(), own.novelty())


@dataclass
class Returned:
    label: Tensor
    value: Tensor
    hidden: Tensor | None = None


Named = namedtuple("Named", ["label", "value"])


class Plain:
    def __init__(self, label: Tensor, value: Tensor) -> None:
        self.label, self.value, self.more = label, value, [label]


FORMS = {
    "dataclass": Returned,
    "named tuple": Named,
    "object": Plain,
    "tuple": lambda label, value: (label, value),
    "list": lambda label, value: [label, value],
    "nested": lambda label, value: {"heads": (label, value), "loss": None},
}


@pytest.mark.parametrize("form", FORMS)
def test_what_a_model_returns(form: str) -> None:
    model, x, targets = data()
    expected = fit(model, [(x, targets)], "diag").variance()
    model.form = FORMS[form]
    output = "heads" if form == "nested" else None
    pair, label, value = (targets["label"], targets["value"]), targets["label"], targets["value"]
    batches: list[Any] = [(x, pair)]
    if form == "tuple":
        batches += [(x, label, value), [x, [*pair]], {"x": x, **targets}, {"x": x, "targets": pair}]
    for batch in batches:
        found = fit(model, [batch], "diag", output=output)
        for name, variance in found.variance().items():
            assert torch.equal(variance, expected[name])
    prediction = uq.wrap(model, found)(x)
    assert prediction.label.probs.shape == (SAMPLES, 3)
    torch.testing.assert_close(prediction.log_prob(pair), prediction.log_prob(targets))
    assert len(uq.wrap(model, found).predict([(x[:2], label[:2]), x[2:5]], progress=False)) == 5


class Own(uq.Likelihood):
    """Values of a Laplace distribution."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def distribution(self, outputs: Tensor) -> torch.distributions.Laplace:
        return torch.distributions.Laplace(outputs, self.scale, validate_args=False)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, 1 / self.scale)


def test_a_head_with_a_likelihood_of_the_users(tmp_path: Path) -> None:
    model, x, targets = data()
    likelihood = uq.Joint(label="classification", value=Own(0.5))
    posterior = fit(model, [(x, targets)], "kfac", likelihood)
    uq.save(posterior, tmp_path / "p.h5")
    with pytest.raises(uq.PosthocUQError, match=r"likelihood 'Own'.*pass an object"):
        uq.load(tmp_path / "p.h5", model)
    with pytest.raises(uq.PosthocUQError, match=r"scale was 0.5"):
        uq.load(tmp_path / "p.h5", model, likelihood=uq.Joint(label="classification", value=Own(0.4)))
    with pytest.raises(uq.PosthocUQError, match=r"with the heads \['label', 'value'\]"):
        uq.load(tmp_path / "p.h5", model, likelihood=uq.Joint(value=Own(0.5), label="classification"))
    read = uq.load(tmp_path / "p.h5", model, likelihood=likelihood)
    own, again = (uq.wrap(model, each)(x).value.variance for each in (posterior, read))
    torch.testing.assert_close(again, own)


CHANGES: dict[str, tuple[Any, str]] = {
    "one head": (lambda v: v["heads"].pop("value"), "heads must be of at least 2 entries"),
    "another shape": (lambda v: v["shapes"].update(other=[1]), "a shape of every head"),
    "a head in a head": (lambda v: v["heads"].update(value=copy.deepcopy(v)), "heads in a head"),
    "an unknown one": (lambda v: v["heads"].update(value={"name": "none"}), "has the name 'none'"),
    "a noise of -1": (
        lambda v: v["heads"]["value"].update(noise_variance=[-1.0]),
        "noise_variance",
    ),
    "a huge head": (lambda v: v["shapes"].update(value=[2**20, 2**20]), "more than"),
    "a weight of 0": (
        lambda v: v.update(loss_weights={"value": 0.0}),
        "loss_weights, value must be at least",
    ),
    "a reserved name": (
        lambda v: [v[each].update(picked=v[each].pop("value")) for each in ("heads", "shapes")],
        "a name that is none",
    ),
}


def test_what_a_file_may_say(tmp_path: Path) -> None:
    model, x, targets = data()
    posterior, path = fit(model, [(x, targets)], "diag", layers="last"), tmp_path / "p.h5"
    for change, message in CHANGES.values():
        uq.save(posterior, path)
        edit_state(path, lambda state, change=change: change(state["likelihood"]))
        with pytest.raises(uq.CorruptPosteriorError, match=message):
            uq.load(path, model)


REFUSALS: dict[str, tuple[Any, str]] = {
    "one head": (lambda: uq.Joint(label="classification"), "2 to 64 heads by name"),
    "a taken name": (lambda: uq.Joint(set="classification", value="regression"), "cannot be named 'set'"),
    "no likelihood": (
        lambda: uq.Joint(label="classes", value="regression"),
        "Head 'label': likelihood must be",
    ),
    "a weight of no head": (
        lambda: uq.Joint(label="binary", value="regression", loss_weights={"values": 1}),
        "loss_weights has 'values'",
    ),
    "a weight of 0": (
        lambda: uq.Joint(label="binary", value="regression", loss_weights={"value": 0}),
        "loss weight of head 'value'",
    ),
    "joint in joint": (lambda: uq.Joint(label="binary", value=LIKELIHOOD), "is a uq.Joint"),
    "a mapping": (lambda: run(likelihood={"label": "classification"}), r"it is uq.Joint\(label="),
    "outputs without the heads": (
        lambda: run(
            (torch.zeros(SAMPLES),) * 2, likelihood=uq.Joint(label="classification", mean="regression")
        ),
        r"model returns dict of 'label'.*heads \['label', 'mean'\]",
    ),
    "a tensor": (lambda: run(output="label"), "model returns Tensor of .*a tuple of them in this order"),
    "targets of one head": (lambda: run({"label": torch.zeros(SAMPLES).long()}), r"targets are \['label'\]"),
    "targets as a tensor": (
        lambda: run(torch.zeros(SAMPLES, 3)),
        r"a mapping with their names.*labels \(\) or",
    ),
    "another number of targets": (
        lambda: run(value=torch.zeros(SAMPLES, 3)),
        r"'value': 'values \(2,\)'.*do not fit",
    ),
    "numbers of targets that are exchanged": (
        lambda: run(label=torch.zeros(SAMPLES, 2).long(), value=torch.zeros(SAMPLES)),
        r"have \[2, 1\] numbers a sample, and \[1, 2\]",
    ),
    "labels that are no labels": (lambda: run(label=torch.full((SAMPLES,), 0.5)), "labels must be integers"),
    "labels out of range": (
        lambda: run(label=torch.full((SAMPLES,), 3)),
        "Head 'label': Labels run from 3 to 3",
    ),
    "rows of another number": (lambda: run(value=torch.zeros(SAMPLES - 1, 2)), "must have one row a sample"),
    "no numbers": (
        lambda: run(value=torch.full((SAMPLES, 2), math.nan)),
        "Head 'value': Some targets are not",
    ),
    "outputs alone": (
        lambda: uq.calibrate_outputs(torch.zeros(4, 5), torch.zeros(4, 5), likelihood=LIKELIHOOD),
        "of one head; call it for each",
    ),
    "a noise": (lambda: run(noise_variance=1.0), "brings its own noise"),
    "probabilities": (
        lambda: run(form=lambda label, value: (label.softmax(1), value)),
        "outputs of head 'label' are probabilities",
    ),
}


def run(given: Any = None, form: Any = dict, likelihood: Any = None, **options: Any) -> uq.Posterior:
    model, x, targets = data()
    model.form = form
    targets = targets | {name: options.pop(name) for name in ("label", "value") if name in options}
    likelihood = uq.Joint(label="classification", value="regression") if likelihood is None else likelihood
    return fit(model, [(x, targets if given is None else given)], "diag", likelihood, **options)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(uq.PosthocUQError, match=message):
        call()


# Hyperparameters, promises, measures


def kept(
    method: str = "diag", samples: int = 60
) -> tuple[nn.Module, Tensor, dict[str, Tensor], uq.Posterior]:
    model, x, targets = data(samples)
    likelihood = uq.Joint(label="classification", value="regression")
    posterior = uq.fit(model, [(x, targets)], method, layers="last", likelihood=likelihood, progress=False)
    return model, x, targets, posterior


def test_found_by_the_data_of_all_heads() -> None:
    model, x, targets, posterior = kept()
    with torch.no_grad():
        outputs = model(x)
    noise = (outputs["value"] - targets["value"]).square().mean(0)
    found = posterior.likelihood.head_likelihoods["value"].noise_variance
    torch.testing.assert_close(found, noise)
    # the faithful prior, by the sum of the heads' divergences
    prediction, faithful = uq.wrap(model, posterior)(x), posterior.history.faithful
    network = Normal(outputs["value"], noise.sqrt())
    own = Normal(prediction.value.mean, prediction.value.standard_deviation)
    divergence = (
        torch.distributions.kl_divergence(network, own).mean()
        + (outputs["label"].softmax(1) * (outputs["label"].log_softmax(1) - prediction.label.probs.log()))
        .sum(1)
        .mean()
    )
    assert faithful is not None and faithful.divergence == pytest.approx(float(divergence), rel=1e-6)
    # held-out labels of both heads
    tuned = uq.tune(posterior, [(x, targets)], progress=False)
    trials, log_prob = tuned.history.trials, uq.wrap(model, tuned)(x).log_prob(targets)
    assert trials is not None and trials.chosen is not None
    assert trials.chosen.objective == pytest.approx(-float(log_prob.mean()))
    assert {"prior_precision", "noise_scale"} <= {*trials.searched} and tuned.temperature != 1
    with pytest.raises(uq.PosthocUQError, match="not for likelihood='joint'"):
        uq.tune(posterior, [(x, targets)], criterion="leave_one_out", progress=False)
    # temperature divides logits alone, the noise scale is of values
    other = posterior.with_settings(temperature=2.0, noise_scale=3.0)
    warm = uq.wrap(model, other)(x)
    torch.testing.assert_close(warm.value.mean, prediction.value.mean)
    torch.testing.assert_close(warm.value.epistemic_variance, prediction.value.epistemic_variance)
    torch.testing.assert_close(warm.value.noise_variance, 3 * prediction.value.noise_variance)
    torch.testing.assert_close(warm.label.logits_mean, outputs["label"] / 2)
    torch.testing.assert_close(warm.label.logits_variance, prediction.label.logits_variance / 4)
    drawn, half = (uq.wrap(model, each, "sampling", n_samples=3)(x[:4]) for each in (posterior, other))
    torch.testing.assert_close(half.label.logits_mean, drawn.label.logits_mean / 2)
    torch.testing.assert_close(half.value.mean, drawn.value.mean)


def columns(targets: dict[str, Tensor]) -> list[Tensor]:
    return [targets["label"][:, None], targets["value"]]


def test_data_come_in() -> None:
    model, x, targets = data()
    halves = [(x[i], {n: t[i] for n, t in targets.items()}) for i in (slice(20), slice(20, None))]
    updated = uq.update(fit(model, halves[:1], layers="last"), halves[1:], progress=False)
    whole = fit(model, halves, layers="last")
    new = x[:5]
    gradients = whole.sample_gradients(*halves[0]).sum(0)
    log_prob = whole.likelihood.log_prob(
        outputs_of(model, x[:20]),
        torch.cat([torch.tensor([[1.0, 2.0]]).expand(20, 2), *columns(halves[0][1])], 1),
    )
    parameters = dict(model.named_parameters())
    own = torch.autograd.grad(log_prob.sum(), [parameters[name] for name in whole.parameter_names])
    torch.testing.assert_close(gradients, torch.cat([each.flatten() for each in own]))
    expected = uq.wrap(model, whole).functional_covariance(new)
    torch.testing.assert_close(uq.wrap(model, updated).functional_covariance(new), expected)


def test_mixtures_of_networks() -> None:
    model, x, targets, posterior = kept()
    other = Two()
    with torch.no_grad():
        other.label.bias += 0.3
    second = fit(other, [(x, targets)], "diag", uq.Joint(label="classification", value="regression"))
    one, two, both = (
        uq.wrap(m, p)(x[:4])
        for m, p in ((model, posterior), (other, second), ([model, other], [posterior, second]))
    )
    torch.testing.assert_close(both.label.probs, (one.label.probs + two.label.probs) / 2)
    torch.testing.assert_close(both.value.mean, (one.value.mean + two.value.mean) / 2)
    promising = uq.calibrate(uq.wrap([model, other], [posterior, second]), [(x, targets)], progress=False)
    lower, upper = promising.predict([(x, targets)], progress=False).value.interval(0.8)
    assert bool((lower < upper).all()) and promising(x[:4]).label.set(0.8).shape == (4, 3)


def test_promises_by_head(tmp_path: Path) -> None:
    model, x, targets, posterior = kept()
    posterior = uq.calibrate(posterior, [(x, targets)], share=None, progress=False)
    uq.save(posterior, tmp_path / "p.h5")

    def with_former_names(state: dict[str, Any]) -> None:  # as it was written before
        held = state["history"]["promises"]
        for found in (held["inputs"], held["tails"]):
            found["functional_variance"] = found.pop("epistemic_variance")

    edit_state(tmp_path / "p.h5", with_former_names)
    read = uq.load(tmp_path / "p.h5", model, untrusted=True)
    familiar = (uq.wrap(model, each)(x).familiarity("epistemic_variance") for each in (read, posterior))
    assert torch.equal(*familiar)
    plain = uq.wrap(model, posterior.noted(promises=None))(x)
    rank = math.ceil((len(x) + 1) * 0.9) - 1
    distances = ((targets["value"] - plain.value.mean).abs() / plain.value.standard_deviation).sort(0).values
    misfits = (1 - plain.label.probs.gather(1, targets["label"][:, None])[:, 0]).sort().values
    for own in (uq.wrap(model, posterior)(x), uq.wrap(model, read)(x).picked(slice(None)).completed()):
        upper = plain.value.mean + distances[rank] * plain.value.standard_deviation
        torch.testing.assert_close(own.value.interval(0.9)[1], upper, rtol=1e-5, atol=1e-6)
        held = 1 - plain.label.probs <= misfits[rank] + 1e-6
        assert torch.equal(own.label.set(0.9), held)
        assert bool((own.label.familiarity("entropy") > 0).all()) and bool((own.familiarity() > 0).all())
    assert "of label sets by 'lac'" in str(posterior.report())
    jointly = uq.calibrate(posterior, [(x, targets)], jointly=True, sets="aps", by_class=True, progress=False)
    promises = jointly.history.promises
    assert promises is not None and promises.heads is not None and promises.targets is None
    assert (
        len(promises.heads["value"].targets.scores) == 1 and len(promises.heads["label"].targets.scores) == 3
    )
    assert uq.wrap(model, jointly)(x[:3]).label.set(0.5).any()
    with pytest.raises(uq.PosthocUQError, match="held-out samples"):
        Service(uq.wrap(model, jointly), None, level=0.99)
    with pytest.raises(uq.PosthocUQError, match="one of the heads"):
        uq.wrap(model, jointly)(x[:3]).set(0.5)
    with pytest.raises(uq.PosthocUQError, match="class_rates are of classes"):
        uq.calibrate(posterior, [(x, targets)], class_rates=[0.2, 0.3, 0.5], progress=False)
    void = uq.wrap(model, read.with_settings(temperature=3.0))(x[:3])
    with pytest.raises(uq.PosthocUQError, match="hyperparameters changed"):
        void.label.set(0.5)


def test_measures_by_head(tmp_path: Path) -> None:
    model, x, targets, posterior = kept()
    predictor = uq.wrap(model, posterior)
    found = uq.evaluate(
        {"network": model, "posterior": predictor},
        [(x, targets)],
        ood_loaders={"far": [(5 * x, targets["label"])]},
        class_names={"label": ["a", "b", "c"]},
        progress=False,
    )
    prediction = predictor.predict([x[:40], x[40:]], progress=False)
    right = prediction.label.predicted() == targets["label"]
    assert found["label"].metrics["posterior"]["accuracy"] == pytest.approx(float(right.double().mean()))
    error = (prediction.value.mean - targets["value"]).square().mean().sqrt()
    assert found.metrics["posterior"]["value_rmse"] == pytest.approx(float(error))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(x)["label"], targets["label"])
    assert found.metrics["network"]["label_nll"] == pytest.approx(float(loss))
    assert "novelty" in found.value.foreign["posterior"]["far"]
    assert {row["model"] for row in found.rows()} == {
        f"{row}, {head}" for row in ("network", "posterior") for head in ("label", "value")
    }
    assert "label: quality on 60 test inputs" in str(found) and [*found.to_dict()] == ["label", "value"]
    found.to_json(tmp_path / "e.json")
    with pytest.raises(uq.PosthocUQError, match=r"one of the heads.*report\(path\)"):
        found.report(tmp_path / "e.html")
    with pytest.raises(uq.PosthocUQError, match="class_names of several heads are a mapping"):
        uq.evaluate(predictor, [(x, targets)], class_names=["a"], progress=False)
    assert predictor.predictive_samples(x[:4], n_samples=2, targets=True).shape == (2, 4, 2 + 3)
    with pytest.raises(uq.PosthocUQError, match="functional_samples"):
        predictor.predictive_samples(x[:4], n_samples=2)
    assert [*prediction.answers()[0]] == ["label", "value"]
    assert {"label.probs", "value.mean", "novelty"} <= {*prediction.to_dict()}
    assert {"label", "value", "log_prob"} <= {*dir(prediction)}
    with pytest.raises(uq.PosthocUQError, match=r"those of \['label', 'value'\].*to export it"):
        uq.export(predictor, x[:4])
    with pytest.raises(AttributeError, match="has no 'probs'"):
        _ = prediction.probs
    with pytest.raises(uq.PosthocUQError, match="no head 'lable'"):
        _ = prediction["lable"]


# A fixed number of slots, such as the queries of a detector

SLOTS, EMPTY = 3, -100
SLOTTED = uq.Joint(logits="classification", boxes=uq.Gaussian(NOISE, channel_dim=-1, missing="ignore"))


class Slots(nn.Module):
    """Logits of four classes and the two ends of a box for each of three slots."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.logits, self.boxes = nn.Linear(3, SLOTS * 4).double(), nn.Linear(3, SLOTS * 2).double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = x.tanh()
        return {
            "logits": self.logits(hidden).unflatten(1, (SLOTS, 4)),
            "boxes": self.boxes(hidden).unflatten(1, (SLOTS, 2)),
            "auxiliary": hidden,
        }


def slots(samples: int = SAMPLES) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    model, x = Slots(), inputs_of(3, samples=samples, dtype=torch.float64)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        found = model(x)
        labels, empty = Categorical(logits=found["logits"]).sample(), torch.rand(samples, SLOTS) < 0.3
        scales = torch.tensor([0.2, 0.6], dtype=torch.float64)
        boxes = found["boxes"] + scales * torch.randn(samples, SLOTS, 2, dtype=torch.float64)
    return (
        model,
        x,
        {
            "logits": labels.masked_fill(empty, EMPTY),
            "boxes": boxes.masked_fill(empty.unsqueeze(2), math.nan),
        },
    )


def test_slots(tmp_path: Path) -> None:
    model, x, targets = slots()
    posterior = fit(model, [(x, targets)], likelihood=SLOTTED)
    assert posterior.likelihood.attributes()["heads"]["logits"] == {"name": "classification", "class_dim": -1}
    found, there = model(x), (targets["logits"] != EMPTY).double()
    probs = found["logits"].detach().softmax(2)
    of_classes = torch.diag_embed(probs) - probs.unsqueeze(3) * probs.unsqueeze(2)
    parameters, rows = [*model.parameters()], []
    for sample in torch.cat([found["logits"].flatten(1), found["boxes"].flatten(1)], 1):
        for output in sample:
            own = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
            pairs = zip(own, parameters, strict=True)
            rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    jacobians = torch.stack(rows).unflatten(0, (SAMPLES, -1))
    ggn = TAU * torch.eye(jacobians.shape[2], dtype=torch.float64)
    for n in range(SAMPLES):
        blocks = [there[n, s] * of_classes[n, s] for s in range(SLOTS)]
        blocks += [there[n, s] * torch.eye(2, dtype=torch.float64) / NOISE for s in range(SLOTS)]
        ggn = ggn + jacobians[n].T @ torch.block_diag(*blocks) @ jacobians[n]
    covariance = jacobians[:5] @ torch.linalg.inv(ggn) @ jacobians[:5].mT
    predictor = uq.wrap(model, posterior)
    torch.testing.assert_close(predictor.functional_covariance(x[:5]), covariance)
    prediction = predictor(x[:5])
    spread = covariance.diagonal(0, 1, 2)
    torch.testing.assert_close(prediction.boxes.epistemic_variance, spread[:, 12:].unflatten(1, (SLOTS, 2)))
    assert prediction.logits.probs.shape == (5, SLOTS, 4) and prediction.boxes.mean.shape == (5, SLOTS, 2)
    # each slot has the covariance of its own logits
    noise = torch.randn(100_000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for slot in range(SLOTS):
        part = slice(4 * slot, 4 * slot + 4)
        root = torch.linalg.cholesky(covariance[:, part, part])
        draws = found["logits"][:5, slot].detach() + torch.einsum("nkl,sl->snk", root, noise)
        torch.testing.assert_close(
            prediction.logits.probs[:, slot], draws.softmax(2).mean(0), rtol=0, atol=3e-3
        )
    # noise of each end of a box, promises, and measures of the slots that are filled
    likelihood = uq.Joint(logits="classification", boxes=uq.Gaussian(channel_dim=-1, missing="ignore"))
    posterior = uq.fit(model, [(x, targets)], "diag", likelihood=likelihood, progress=False)
    errors = (found["boxes"].detach() - targets["boxes"]).square().nanmean((0, 1))
    variances = posterior.likelihood.head_likelihoods["boxes"].noise_variance
    torch.testing.assert_close(variances, errors)
    posterior = uq.calibrate(posterior, [(x, targets)], progress=False)
    uq.save(posterior, tmp_path / "p.h5")
    predictor = uq.wrap(model, uq.load(tmp_path / "p.h5", model))
    prediction = predictor(x)
    assert prediction.logits.set(0.8).shape == (SAMPLES, SLOTS, 4)
    lower, upper = prediction.boxes.interval(0.8, by="image")
    assert lower.shape == (SAMPLES, SLOTS, 2) and bool((lower < upper).all())
    measured = uq.evaluate(predictor, [(x, targets)], progress=False)
    right = (prediction.logits.predicted() == targets["logits"])[there.bool()]
    accuracy = measured.metrics["linearized"]["logits_accuracy"]
    assert accuracy == pytest.approx(float(right.double().mean()))
    of_filled = prediction.logits.masked(there).scores()["entropy"][there.any(1)]
    scores = measured["logits"].predictions["linearized"]["test"].scores()["entropy"][there.any(1)]
    torch.testing.assert_close(scores, of_filled, rtol=1e-5, atol=1e-6)


def test_drawn_labels_of_two_heads_are_independent() -> None:
    model, x, targets = data()
    likelihood: Any = fit(model, [(x, targets)], "diag").likelihood
    samples = 40_000
    outputs, keys = outputs_of(model, x[:1]).detach(), torch.arange(samples)
    (scores,) = likelihood.gradients(outputs.expand(samples, 5), None, keys, "mc")
    expected = fishers(model, x[:1])[0]
    # the standard error of a mean over the draws is at most 3.3 / 200
    torch.testing.assert_close(scores.T @ scores / samples, expected, rtol=0, atol=0.08)
    factors = torch.stack([factor[0] for factor in likelihood.exact_factors(outputs)])
    torch.testing.assert_close(factors.T @ factors, expected)
    drawn = likelihood.split_targets(likelihood.draw(outputs.expand(samples, 5), keys, 0))
    shares = drawn["label"].bincount(minlength=3) / samples
    torch.testing.assert_close(
        shares, model(x[:1])["label"][0].detach().softmax(0).float(), rtol=0, atol=0.01
    )


def test_many_outputs_are_drawn() -> None:
    model, x = Two(), inputs_of(3, samples=12, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.value = nn.Linear(4, 300).double()
    targets = {"label": torch.arange(12) % 3, "value": model(x)["value"].detach() + 0.3}
    posterior = uq.fit(
        model,
        [(x, targets)],
        "diag",
        likelihood=uq.Joint(label="classification", value="regression"),
        layers="all",
        progress=False,
    )
    own, exact = (uq.wrap(model, posterior, engine=engine)(x[:2]) for engine in ("auto", "exact"))
    ratios = own.value.epistemic_variance / exact.value.epistemic_variance
    assert float((ratios - 1).abs().max()) > 1e-3 and float(ratios.mean()) == pytest.approx(1, abs=0.25)


class Sliced(nn.Module):
    """Three values of one layer, together or as two heads."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.apart = apart

    def forward(self, x: Tensor) -> Any:
        outputs = self.body(x)
        return {"one": outputs[:, 0], "two": outputs[:, 1:]} if self.apart else outputs


@pytest.mark.parametrize("method", ["diag", "kfac", "efb", "inf", "full"])
def test_heads_that_are_parts_of_one_regression(method: str) -> None:
    """Every method then has the posterior of that regression, a closed form of its last layer or not."""
    x = inputs_of(3, samples=SAMPLES, dtype=torch.float64)
    y = inputs_of(3, samples=SAMPLES, seed=7, dtype=torch.float64)
    likelihood = uq.Joint(one=uq.Gaussian(NOISE), two=uq.Gaussian(NOISE))
    for layers in ("all", "last"):
        whole, apart = Sliced(False), Sliced(True)
        expected = fit(whole, [(x, y)], method, uq.Gaussian(NOISE), layers=layers)
        found = fit(apart, [(x, (y[:, 0], y[:, 1:]))], method, likelihood, layers=layers)
        for head in ("linearized", "moments"):
            one, both = uq.wrap(whole, expected, head)(x[:4]), uq.wrap(apart, found, head)(x[:4])
            variances = torch.cat([both.one.variance[:, None], both.two.variance], 1)
            torch.testing.assert_close(variances, one.variance)
            torch.testing.assert_close(both.log_prob((y[:4, 0], y[:4, 1:])), one.log_prob(y[:4]))
        evidences = [float(p.log_marginal_likelihood()) for p in (expected, found)]
        assert evidences[1] == pytest.approx(evidences[0], rel=1e-9)


def test_targets_for_a_device_without_float64_are_float32() -> None:
    parts = torch.arange(4), torch.randn(4, 2)
    assert joined_targets(parts).dtype == torch.float64
    assert joined_targets(parts, torch.device("mps")).dtype == torch.float32
