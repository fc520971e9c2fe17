"""The code of the documents runs as it stands, from the first block of a page to its last."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import posthoc_uq as uq

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[str]:
    """The Python code of a page, each block with as many empty lines before it as the page has."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return ["\n" * text[: match.start(1)].count("\n") + match.group(1) for match in found]


def classifier() -> dict[str, Any]:
    """What the pages assume: a trained classifier of images, and loaders."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5)).eval()
        images, foreign = torch.randn(40, 1, 6, 6), 3 * torch.randn(40, 1, 6, 6)
    labels = model(images).argmax(1)
    data = TensorDataset(images, labels)
    loader = DataLoader(data, batch_size=20)
    return {
        "uq": uq,
        "torch": torch,
        "DataLoader": DataLoader,
        "DistributedSampler": DistributedSampler,
        "model": model,
        "images": images[:8],
        "data": data,
        "loader": loader,
        "train_loader": loader,
        "val_loader": loader,
        "test_loader": loader,
        "digits": [foreign],
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", ["README.md", "docs/getting_started.md"])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    names = classifier()
    code = blocks(page)
    assert code
    try:
        for block in code:
            exec(compile(block, str(ROOT / page), "exec"), names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert isinstance(names["posterior"], uq.Posterior)
    assert (tmp_path / "resnet18.inf.h5").exists()


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_to_files(page: str) -> None:
    text = re.sub(
        r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    for target in re.findall(r"\]\(([^()\s]+)\)", text):
        path = target.partition("#")[0]
        if path and not re.match(r"[a-z]+:", path):
            assert ((ROOT / page).parent / path).exists(), target


def test_every_public_name_has_its_place_in_the_reference() -> None:
    pages = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "reference").glob("*.md"))
    named = {line.rpartition(".")[2] for line in pages.splitlines() if line.startswith("::: ")}
    assert {name for name in uq.__all__ if not name.startswith("_")} <= named


def test_every_document_is_in_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs').as_posix()}\n" in navigation + "\n", page
