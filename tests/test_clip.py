"""Two towers: the CLIP of transformers, made from its configuration, against dense Jacobians by autograd in float64."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import posthoc_uq as uq

VISUAL, TEXT = "clip.visual_projection", "clip.text_projection"
TOWERS = pytest.mark.parametrize(
    "towers", [(VISUAL,), (TEXT,), (VISUAL, TEXT)], ids=["image", "text", "both"]
)
HEADS = ("linearized", "sampling", "moments")
SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


class ZeroShot(nn.Module):
    def __init__(self, clip: nn.Module, ids: Tensor) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.clip(input_ids=self.ids, pixel_values=pixel_values).logits_per_image


def prompts(classes: int) -> Tensor:
    ids = torch.randint(2, 50, (classes, 6), generator=torch.Generator().manual_seed(classes))
    ids[:, -1] = 1
    return ids


@functools.cache
def zero_shot(classes: int = 3) -> ZeroShot:
    if classes != 3:
        return ZeroShot(zero_shot().clip, prompts(classes)).eval()
    text = {"vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1, **SIZES}
    vision = {"image_size": 8, "patch_size": 4, **SIZES}
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ZeroShot(hf.CLIPModel(config), prompts(3)).eval().double()


def pictures(samples: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64)


X, NEW = pictures(10, 0), pictures(4, 1)
Y = torch.arange(10) % 3


@functools.cache
def fitted(method: str, towers: tuple[str, ...], prior: float = 1.0) -> uq.Posterior:
    loader = [(X[:6], Y[:6]), (X[6:], Y[6:])]
    return uq.fit(
        zero_shot(), loader, method, layers=[*towers], prior_precision=prior, fisher="exact", progress=False
    )


def jacobians(towers: tuple[str, ...], x: Tensor) -> Tensor:
    """(samples, classes, weights), one backward pass a sample and class."""
    model = zero_shot()
    weights = [model.get_parameter(f"{tower}.weight") for tower in towers]
    rows = []
    for sample in x:
        outputs = model(sample.unsqueeze(0))[0]
        of_class = (torch.autograd.grad(each, weights, retain_graph=True) for each in outputs)
        rows.append(torch.stack([torch.cat([part.flatten() for part in parts]) for parts in of_class]))
    return torch.stack(rows)


@TOWERS
@pytest.mark.parametrize("method", ["full", "diag"])
def test_the_covariance_is_the_dense_one_through_the_cosine(method: str, towers: tuple[str, ...]) -> None:
    seen, new = jacobians(towers, X), jacobians(towers, NEW)
    probs = zero_shot()(X).softmax(1).detach()
    middle = torch.diag_embed(probs) - probs.unsqueeze(2) * probs.unsqueeze(1)
    fisher = torch.einsum("nci,ncd,ndj->ij", seen, middle, seen)
    fisher = fisher if method == "full" else torch.diag(fisher.diagonal())
    expected = (
        new @ torch.linalg.inv(fisher + torch.eye(len(fisher), dtype=fisher.dtype)) @ new.transpose(1, 2)
    )
    found: Any = uq.wrap(zero_shot(), fitted(method, towers), "linearized").distribution(NEW)
    torch.testing.assert_close(found.covariance, expected, rtol=1e-9, atol=1e-9)


@TOWERS
@pytest.mark.parametrize("method", ["kfac", "inf"])
def test_every_head_serves_every_tower(method: str, towers: tuple[str, ...]) -> None:
    """With a novelty by the image, and variances that agree with draws of the weights within their factors."""
    posterior = fitted(method, towers, 1000.0)
    variances = {}
    for head in HEADS:
        options: dict[str, Any] = {"n_samples": 200, "seed": 0} if head == "sampling" else {}
        prediction = uq.wrap(zero_shot(), posterior, head, **options)(NEW)
        assert prediction.probs.shape == (4, 3) and bool((prediction.novelty() > 0).all())
        variances[head] = prediction.epistemic_variance.mean()
    assert 0.7 < variances["linearized"] / variances["sampling"] < 1.4
    # the numbers of an embedding count as independent there
    assert 0.7 < variances["moments"] / variances["sampling"] < 4


def test_both_are_chosen_where_nothing_is_said_and_other_prompts_have_other_classes(tmp_path: Path) -> None:
    posterior = uq.fit(zero_shot(), [(X, Y)], "diag", layers="last", prior_precision=1.0, progress=False)
    assert sorted(posterior.layers) == sorted([VISUAL, TEXT])
    uq.save(posterior, tmp_path / "clip.h5")
    posterior = uq.load(tmp_path / "clip.h5", zero_shot())
    for head in HEADS:
        prediction = uq.wrap(zero_shot(5), posterior, head)(NEW)
        assert prediction.probs.shape == (4, 5) and bool(torch.isfinite(prediction.novelty()).all())


class Compared(nn.Module):
    """Samples against prompts that go through a linear layer; with `twice` the weight is used otherwise, too."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.projection, self.twice = nn.Linear(4, 5, bias=False), twice
        self.register_buffer("prompts", torch.randn(3, 4, generator=generator))
        self.projection.weight.data = torch.randn(5, 4, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        outputs = x @ self.projection(self.prompts).T
        return outputs + self.projection.weight.sum() if self.twice else outputs


def test_moments_of_rows_that_all_samples_share() -> None:
    """``Var x^T W p = sum_ij x_i^2 p_j^2 Var W_ij``; one that is used otherwise, too, is certain, which is said."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = Compared(False).double().eval()
    posterior = uq.fit(model, [(x, Y[:6])], "diag", prior_precision=2.0, progress=False)
    variances = posterior.variance()["projection.weight"]
    found: Any = uq.wrap(model, posterior, "moments").distribution(x)
    expected = torch.einsum("ni,cj,ij->nc", x.square(), model.prompts.square(), variances)
    torch.testing.assert_close(found.variance, expected)
    other = Compared(True).double().eval()
    predictor = uq.wrap(
        other, uq.fit(other, [(x, Y[:6])], "diag", prior_precision=2.0, progress=False), "moments"
    )
    with pytest.warns(UserWarning, match="their uncertainty is missing"):
        first: Any = predictor.distribution(x)
    assert not bool(first.variance.any()) and torch.equal(first.mean, other(x))
    torch.testing.assert_close(
        uq.wrap(other, predictor.posterior, "sampling", seed=0)(x).probs.sum(1), x.new_ones(6)
    )
