"""All weights side by side: density, precision, Jacobians, gradients, against torch.distributions and torch.func."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.func import functional_call, grad, jacrev, vmap  # pyright: ignore[reportPrivateImportUsage]

import posthoc_uq as uq


class Net(nn.Module):
    """A grouped convolution and a linear layer; the one that runs last is the first to be defined."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(2, 3)
        self.first = nn.Conv2d(2, 2, 2, groups=2)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).flatten(1))


GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(20, 2, 2, 2, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (20,), generator=GENERATOR)
WIDE: dict[str, Any] = {"dtype": torch.float64}
METHODS: dict[str, uq.Method] = {
    "diag": uq.Diagonal(**WIDE),
    "kfac": uq.KFAC(**WIDE),
    "efb": uq.EFB(**WIDE),
    "full": uq.Dense(**WIDE),
    "subnetwork": uq.Subnetwork(n=11, **WIDE),
    "subnetwork, diagonal": uq.Subnetwork(n=11, structure="diag", **WIDE),
    "inf": uq.INF(rank=12, **WIDE),
    "inf without a residual": uq.INF(rank=4, **WIDE),
    "utvi": uq.UTVI(epochs=1),
    "message_passing": uq.MessagePassing(epochs=1),
    "message_passing, full": uq.MessagePassing(epochs=1, posterior="full"),
}


def fit(method: str, model: nn.Module | None = None, **options: Any) -> uq.Posterior:
    chosen, trains = METHODS[method], method.startswith(("utvi", "message"))
    settings = {} if trains else {"prior_precision": 1.5}
    model = Net() if model is None else model
    return uq.fit(model, [(X, Y)], chosen, progress=False, **settings | options)


def flat(posterior: uq.Posterior, named: Any, lead: int = 0) -> Tensor:
    return torch.cat([named[name].detach().flatten(lead) for name in posterior.parameter_names], lead)


def covariance(posterior: uq.Posterior) -> Tensor:
    """Of all weights in the order of the model's, by quadratic forms of unit vectors."""
    means = {name: posterior.mean[name] for name in posterior.parameter_names}
    size = sum(mean.numel() for mean in means.values())
    parts = torch.eye(size).double().split([mean.numel() for mean in means.values()], 1)
    units = {name: part.reshape(-1, *means[name].shape) for name, part in zip(means, parts, strict=True)}
    return posterior.quadratic(
        {
            name: layer.to_matrix(units[layer.weight], units[layer.bias] if layer.bias else None)
            for name, layer in posterior.layers.items()
        }
    )


@pytest.mark.parametrize("method", METHODS)
def test_density_and_precision_of_every_method(method: str) -> None:
    posterior = fit(method)
    if method == "inf without a residual":
        posterior = posterior.with_settings(residual_weight=0.0)
    order = [n for n, _ in Net().named_parameters() if n in posterior.mean]
    assert posterior.parameter_names == order
    mean, sigma = flat(posterior, posterior.mean), covariance(posterior)
    uncertain = sigma.diagonal() > 0
    law = MultivariateNormal(mean[uncertain], sigma[uncertain][:, uncertain])
    draws = posterior.sample(3, torch.Generator().manual_seed(0))
    at = flat(posterior, draws, 1)
    found, expected = posterior.log_prob(draws), law.log_prob(at[:, uncertain])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(posterior.log_prob(at), found)
    one = {name: draw[0] for name, draw in draws.items()}
    assert posterior.log_prob(one | {"other": X}).shape == ()
    model = Net()
    model.load_state_dict(one, strict=False)
    torch.testing.assert_close(posterior.log_prob(model), found[0])
    precision = posterior.precision_matrix()
    assert bool((precision.diagonal()[~uncertain] == float("inf")).all())
    inside = precision[uncertain][:, uncertain] @ sigma[uncertain][:, uncertain]
    torch.testing.assert_close(inside, torch.eye(len(inside)).double(), rtol=0, atol=1e-6)
    vector = at[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(posterior.log_prob(vector), vector)
    pulled = -precision[uncertain][:, uncertain] @ (at[0] - mean)[uncertain]
    torch.testing.assert_close(slope[uncertain], pulled, rtol=1e-6, atol=1e-7)
    assert not slope[~uncertain].any()


def test_the_dense_precision_is_that_of_the_network() -> None:
    model = Net()
    posterior = uq.fit(
        model, [(X, Y)], "full", fisher="exact", prior_precision=1.5, dtype=torch.float64, progress=False
    )
    jacobian = posterior.jacobians(X)
    weights = dict(model.named_parameters())
    parts = vmap(jacrev(lambda w, x: functional_call(model, w, (x[None],))[0]), (None, 0))(weights, X)
    expected = torch.cat([parts[name].flatten(2) for name in weights], 2).detach()
    torch.testing.assert_close(jacobian, expected, rtol=1e-10, atol=1e-12)
    assert not jacobian.requires_grad
    probs = model(X).softmax(1).detach()
    spread = probs.diag_embed() - probs.unsqueeze(2) * probs.unsqueeze(1)
    ggn = torch.einsum("sop,sok,skq->pq", jacobian, spread, jacobian)
    torch.testing.assert_close(posterior.precision_matrix(), ggn + 1.5 * torch.eye(len(ggn)).double())


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_gradients_of_every_sample(likelihood: str) -> None:
    model, noise = Net(), 0.3
    classes = likelihood == "classification"
    targets = Y if classes else torch.randn(20, 3, generator=torch.Generator().manual_seed(3)).double()
    options = {} if classes else {"noise_variance": noise}
    posterior = uq.fit(
        model, [(X, targets)], "diag", likelihood=likelihood, layers=["last", "first.weight"],
        prior_precision=1.0, progress=False, **options,
    )  # fmt: skip

    def log_prob(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(model, w, (x[None],))[0]
        if classes:
            return outputs.log_softmax(0).gather(0, y[None])[0]
        return torch.distributions.Normal(outputs, noise**0.5).log_prob(y).sum()

    weights = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad(log_prob), (None, 0, 0))(weights, X, targets)
    expected = torch.cat([each[name].flatten(1) for name in ("last.weight", "last.bias", "first.weight")], 1)
    torch.testing.assert_close(posterior.sample_gradients(X, targets), expected, rtol=1e-6, atol=1e-8)
    sums = vmap(log_prob, (None, 0, 0))(weights, X, targets).sum()
    assert posterior.log_likelihood == pytest.approx(float(sums), rel=1e-9)
    assert posterior.training_samples == 20


def test_what_has_no_density_and_weights_that_do_not_fit() -> None:
    posterior = fit("diag")
    for weights, said in (
        (torch.zeros(5), r"of shape \(5,\), and the posterior has 19"),
        ({"last.weight": torch.zeros(3, 2)}, "'last.bias' of shape .* those given are not there"),
        (dict(Net().named_parameters()) | {"last.bias": torch.zeros(4)}, r"are of shape \(4,\)"),
        (3.0, "must be a vector, a state dict or a model, not a float"),
    ):
        with pytest.raises(uq.PosthocUQError, match=said):
            posterior.log_prob(weights)  # type: ignore[arg-type]
    latent = uq.fit(Net().float(), [(X.float(), Y)], uq.LatentBinary(epochs=1), progress=False)
    with pytest.raises(uq.PosthocUQError, match=r"log_prob.* needs a log-determinant and a precision"):
        latent.log_prob(Net())


def test_the_model_itself_may_be_trained_further() -> None:
    """The penalty belongs to the weights of the fit, and what would be at others is refused."""
    model = Net()
    posterior = fit("kfac", model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    at_mean = posterior.log_prob(model)
    with torch.no_grad():
        model.last.bias.add_(0.3)
    found = posterior.log_prob(model)
    moved = {**before, "last.bias": before["last.bias"] + 0.3}
    torch.testing.assert_close(found, fit("kfac").log_prob(moved))
    assert float(found) < float(at_mean)
    with pytest.raises(uq.PosteriorMismatchError, match="changed after the posterior was fitted"):
        posterior.jacobians(X)
    late = fit("kfac", model)
    with torch.no_grad():
        model.last.bias.add_(0.3)
    with pytest.raises(uq.PosteriorMismatchError, match=r"copy\.deepcopy"):
        late.log_prob(model)
