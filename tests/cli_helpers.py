"""What the tests of the command line share: a runner, folders of images, a small model in a file of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import nn

from posthoc_uq.app import main
from posthoc_uq.files import save_load
from posthoc_uq.files.hdf5 import ImageReader

CLASSES = ("cat", "dog", "emu")
SIZE = 12
NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def net(outputs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def one():
    return net(1)


def two():
    return net(2)


def three():
    return net(3)
"""
"""A module of small networks of three inputs, for ``--model``."""
CODE = '''
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def net():
    """Three classes from RGB images; the weights come from a file."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def line():
    return nn.Linear(2, 1)


def points(split="train"):
    generator = torch.Generator().manual_seed({"train": 0, "val": 1, "test": 2}[split])
    x = torch.randn(40, 2, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(40, 1, generator=generator))


def batches():
    return DataLoader(points(), batch_size=10)


def half(image):
    import numpy

    return torch.from_numpy(numpy.asarray(image)[:8, :8].copy()).permute(2, 0, 1).float() / 510


def make_half():
    return half


def needy(size):
    return nn.Linear(size, 1)


def number():
    return 3


pi = 3
'''


def net() -> nn.Module:
    """As in `CODE`."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def make_images(folder: Path, classes: Sequence[str], count: int, seed: int) -> None:
    """Noise with a tint for each class, in a folder for each; or in the folder itself for the class ''."""
    random = np.random.default_rng(seed)
    for tint, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = random.integers(0, 160, (SIZE + 2, SIZE, 3)).astype(np.uint8)
            pixels[..., tint % 3] += 12
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def make_place(folder: Path) -> Path:
    """A folder with ``nets.py``, trained weights ``w.pt``, images ``train``, ``val``, ``flat``."""
    (folder / "nets.py").write_text(CODE)
    for seed, (name, count) in enumerate({"train": 12, "val": 6}.items()):
        make_images(folder / name, CLASSES, count, seed)
    make_images(folder / "flat", ("",), 5, 7)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = net()
        x, y = tensors(folder / "train")
        optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
        for _ in range(25):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
        torch.save(model.state_dict(), folder / "w.pt")
        torch.save(nn.Linear(2, 1).state_dict(), folder / "line.pt")
    return folder


def tensors(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """All images of class folders, sorted by name, as the model without a transform of its own gets them."""
    found = [
        (np.asarray(Image.open(path)).astype(np.float32) / 255, label)
        for label, name in enumerate(sorted(p.name for p in folder.iterdir()))
        for path in sorted((folder / name).iterdir(), key=lambda path: path.name)
    ]
    images = torch.from_numpy(np.stack([pixels for pixels, _ in found])).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor([label for _, label in found])


class Result(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


def words_of(arguments: Sequence[Any]) -> list[str]:
    """Arguments as a shell gives them; several options may stand in one text."""
    return [
        word
        for a in arguments
        for word in (a.split() if isinstance(a, str) and a.startswith("--") else [str(a)])
    ]


def run(*arguments: Any, code: int = 0) -> Result:
    """A command in this process; its exit code must be the expected one, and an error, or wrong usage, one line below
    warnings and what was taken from the posterior's file.

    Files are parsed in this process, too: the child that reads them takes longer than most commands. The CPU is what a
    command finds, since its results are compared with those of functions there.
    """
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: False),
        mock.patch.object(save_load, "ChildReader", ImageReader),
        redirect_stdout(StringIO()) as stdout,
        redirect_stderr(StringIO()) as stderr,
    ):
        ended = main(words_of(arguments))
    result = Result(ended, stdout.getvalue(), stderr.getvalue())
    assert result.code == code, result
    if code in (1, 2):
        errors = [line for line in result.stderr.splitlines() if not line.startswith(("Warning: ", "From '"))]
        assert len(errors) == 1 and errors[0].startswith("Error: "), result.stderr
        assert "Traceback" not in result.stdout + result.stderr
    return result


def failure(*arguments: Any) -> str:
    """What a command that fails says."""
    return run(*arguments, code=1).stderr


def misuse(*arguments: Any) -> str:
    """What a command that is called wrongly says."""
    return run(*arguments, code=2).stderr


def run_json(*arguments: Any, code: int = 0) -> dict[str, Any]:
    """The one JSON object that a command prints."""
    return json.loads(run(*arguments, "--json", code=code).stdout)
