"""The sampling head: an ensemble drawn once, repeatable, thread-safe, and the user's model never written."""

import threading

import pytest
import torch
from torch import nn

import posthoc_uq as uq
from posthoc_uq.errors import PosteriorMismatchError, PosthocUQError
from posthoc_uq.replica import replicate


@pytest.fixture(scope="module")
def setting():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Dropout(),
            nn.Linear(64, 3),
        )
        x, y = torch.randn(40, 1, 6, 6), torch.randint(0, 3, (40,))
    posterior = uq.fit(model, [(x[:20], y[:20]), (x[20:], y[20:])], progress=False, prior_precision=5.0)
    return model, posterior, x


def _by_hand(model, draws, index, x):
    """The model's output with one draw's weights, by the plain functional call."""
    weights = {name: draw[index] for name, draw in draws.items()}
    return torch.func.functional_call(replicate(model), weights, (x,))


def test_members_are_the_draws(setting):
    model, posterior, x = setting
    predictor = uq.wrap(model, posterior, n_samples=4, seed=7)
    draws = posterior.sample(4, torch.Generator().manual_seed(7))
    expected = torch.stack([_by_hand(model, draws, index, x) for index in range(4)])
    torch.testing.assert_close(predictor.outputs(x), expected, atol=1e-6, rtol=1e-5)
    prediction = predictor(x)
    torch.testing.assert_close(prediction.probs, expected.softmax(-1).mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(prediction.logits_mean, expected.mean(0), atol=1e-6, rtol=1e-5)


def test_repeatable_and_redrawn(setting):
    model, posterior, x = setting
    one, two = (uq.wrap(model, posterior, n_samples=3, seed=1) for _ in range(2))
    assert torch.equal(one(x).probs, two(x).probs)
    assert torch.equal(one(x).probs, one(x).probs)  # the ensemble is kept
    assert torch.equal(
        uq.wrap(model, posterior, n_samples=3, generator=torch.Generator().manual_seed(1))(x).probs,
        one(x).probs,
    )
    one.redraw(2)
    assert not torch.equal(one(x).probs, two(x).probs)
    one.redraw(1)
    assert torch.equal(one(x).probs, two(x).probs)
    assert not torch.equal(uq.wrap(model, posterior, n_samples=3, seed=None)(x).probs, two(x).probs)


def test_two_threads_predict_at_once(setting):
    model, posterior, x = setting
    predictor = uq.wrap(model, posterior, n_samples=5)
    expected, weights = predictor(x).probs, {k: v.clone() for k, v in model.state_dict().items()}
    wrong: list[str] = []

    def work() -> None:
        for _ in range(50):
            if not torch.equal(predictor(x).probs, expected):
                wrong.append("prediction")
            if not all(torch.equal(v, weights[k]) for k, v in model.state_dict().items()):
                wrong.append("weights")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_always_in_eval_mode_and_the_model_is_left_alone(setting):
    model, posterior, x = setting
    model.train()
    predictor = uq.wrap(model, posterior, n_samples=2)
    predictor.train()
    assert torch.equal(predictor(x).probs, predictor(x).probs)  # dropout would differ
    assert model.training and model[4].training
    assert all(p.requires_grad for p in model.parameters())
    model.eval()


def test_deterministic_parameters_are_shared(setting):
    """Thirty members must not hold thirty copies of what has no posterior."""
    model, posterior, _ = setting
    predictor = uq.wrap(model, posterior, n_samples=30)
    assert len({id(member[1].weight) for member in predictor.members}) == 1
    assert predictor.members[0][1].weight.data_ptr() == model[1].weight.data_ptr()


def test_one_wild_temperature(setting):
    model, posterior, x = setting
    posterior.temperature = 2.0
    try:
        hot = uq.wrap(model, posterior, n_samples=3).outputs(x)
    finally:
        posterior.temperature = 1.0
    torch.testing.assert_close(2 * hot, uq.wrap(model, posterior, n_samples=3).outputs(x))


def test_regression_prediction():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        x = torch.randn(60, 2)
        y = model(x).detach() + torch.tensor([0.1, 0.5]) * torch.randn(60, 2)
    posterior = uq.fit(model, [(x, y)], likelihood="regression", progress=False)
    noise = posterior.noise_variance
    residual = (model(x).detach() - y).square().mean(0).double()
    torch.testing.assert_close(noise, residual, rtol=1e-5, atol=0)
    prediction = uq.wrap(model, posterior, n_samples=20)(x)
    torch.testing.assert_close(
        prediction.variance, prediction.epistemic_variance + noise.float(), rtol=1e-5, atol=0
    )
    assert prediction.mean.shape == (60, 2)
    low, high = prediction.interval(0.95)
    assert (low < prediction.mean).all() and (prediction.mean < high).all()


def test_binary_prediction():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(60, 2)
    posterior = uq.fit(model, [(x, (x[:, 0] > 0).long())], likelihood="binary", progress=False)
    prediction = uq.wrap(model, posterior, n_samples=20)(x)
    assert prediction.probs.shape == (60, 2)
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(60))


def test_mismatches_are_named(setting):
    model, posterior, _ = setting
    with pytest.raises(PosthocUQError, match="head must be one of"):
        uq.wrap(model, posterior, head="crystal ball")
    with pytest.raises(PosteriorMismatchError, match=r"5\.weight.*does not have"):
        uq.wrap(nn.Sequential(*list(model)[:5]), posterior)
    other = replicate(model)
    other[5] = nn.Linear(64, 4)
    with pytest.raises(PosteriorMismatchError, match=r"shape \(4, 64\)"):
        uq.wrap(other, posterior)
    other[5] = nn.Linear(64, 3)
    with pytest.raises(PosteriorMismatchError, match="values"):
        uq.wrap(other, posterior)
    with pytest.raises(PosthocUQError, match="at least 1"):
        uq.wrap(model, posterior, n_samples=0)
