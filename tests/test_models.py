"""The main job on the architectures people use: fit on 8 random images, sample, save, load, predict."""

import subprocess
import sys

import pytest
import timm
import torch
import torchvision
from torch import nn

import posthoc_uq as uq


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * 16 * 16, 32), nn.ReLU(inplace=True), nn.Linear(32, 10))


class LeNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(16 * 6 * 6, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84,
            10),
        )  # fmt: skip


class UserHead(nn.Module):
    """A timm backbone without its classifier, under a head of the user's."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.body = timm.create_model(name, num_classes=0)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


# name: (constructor, image size, parameters that stay deterministic)
MODELS = {
    "mlp": (MLP, 16, 0),
    "lenet": (LeNet, 32, 0),
    "resnet18": (torchvision.models.resnet18, 128, 40),
    "densenet121": (torchvision.models.densenet121, 96, 242),
    "mobilenet_v3_small": (torchvision.models.mobilenet_v3_small, 64, 68),
    "tf_efficientnet_lite0": (lambda: timm.create_model("tf_efficientnet_lite0"), 128, 98),
    "vit_tiny_patch16_224": (lambda: timm.create_model("vit_tiny_patch16_224"), 224, 52),
    "convnext_atto": (lambda: timm.create_model("convnext_atto"), 128, None),
    "timm backbone, own head": (lambda: UserHead("test_resnet", 96), 32, None),
    "vit_b_16 (in-projection inside attention)": (
        lambda: torchvision.models.VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=10), 64, None,
    ),
    "swin_t (linear calls on windows)": (
        lambda: torchvision.models.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4], num_classes=10), 32,
            None,
    ),
}  # fmt: skip


# nothing in them that smaller ones lack
LARGE = ("resnet18", "densenet121", "tf_efficientnet_lite0", "convnext_atto", "vit_tiny_patch16_224")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.study] * (name in LARGE)) for name in MODELS]
)
def test_main_job(name, tmp_path):
    make, size, deterministic = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, images = make().eval(), torch.randn(8, 3, size, size)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    posterior = uq.fit(
        model, [images[:4], images[4:]], layers="all", rank=20, progress=False, prior_precision=100.0
    )
    # Every weight and bias of every linear and convolution layer has a posterior.
    weighted = sum(
        p.numel()
        for module in model.modules()
        for p in module.parameters(recurse=False)
        if isinstance(module, (nn.Linear, nn.Conv2d))
    )
    attention = sum(
        p.numel()
        for m in model.modules()
        if isinstance(m, nn.MultiheadAttention)
        for p in m.parameters(recurse=False)
    )
    assert sum(mean.numel() for mean in posterior.mean.values()) == weighted + attention
    if deterministic is not None:
        assert len(posterior.history.deterministic) == deterministic
    draws = posterior.sample(2, torch.Generator().manual_seed(0))
    assert all(torch.isfinite(draw).all() for draw in draws.values())
    path = tmp_path / "model.inf.h5"
    uq.save(posterior, path)
    loaded = uq.load(path, model)
    first = uq.wrap(model, posterior, n_samples=2, seed=3)(images)
    second = uq.wrap(model, loaded, n_samples=2, seed=3)(images)
    assert torch.equal(first.probs, second.probs)
    assert torch.equal(first.logits_variance, second.logits_variance)
    assert torch.isfinite(first.probs).all()
    assert (first.epistemic_variance > 0).all()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


_MEMORY = """
import pathlib, resource, torch, torchvision
import posthoc_uq as uq
status = pathlib.Path("/proc/self/status")  # the resource module's peak may begin with the parent's
def peak():
    lines = status.read_text().splitlines() if status.exists() else []
    own = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(own[0]) if own else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
imported = peak()
torch.manual_seed(0)
model, images = torchvision.models.resnet18(), torch.randn(3, 3, 224, 224)
posterior = uq.fit(model, [images], prior_precision="evidence", head="sampling", progress=False)
posterior = posterior.with_settings(prior_precision=1e6)  # three images leave the evidence's too wide
prediction = uq.wrap(model, posterior, n_samples=30)(images)
assert torch.isfinite(prediction.probs).all()
print(peak() - imported)
"""


@pytest.mark.study
def test_peak_memory_of_resnet18():
    """Fit with evidence, thirty draws kept as an ensemble (1.3 GiB), a prediction at 224 px: under 2 GiB above what
    importing torch and torchvision takes, which differs from version to version (0.9 GiB of 2.15).
    """
    done = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) / 2**20 < 2.0
