"""The guide docs/guides/lightning.md as it is written, and what it gives."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import blocks

import posthoc_uq as uq


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the code of the guide leaves."""
    pytest.importorskip("lightning", reason="lightning is not installed")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        for block in blocks("docs/guides/lightning.md"):
            exec(compile(block.content, str(block.place), "exec"), found)
    return found


@pytest.mark.study
def test_a_trainer_predicts_and_a_callback_fits(names: dict[str, Any]) -> None:
    lightning, predictor, loader = names["L"], names["predictor"], names["val_loader"]
    model, quiet = names["model"], names["quiet"]
    expected = predictor.predict(loader, progress=False)
    torch.testing.assert_close(names["prediction"].probs, expected.probs)
    assert torch.equal(names["prediction"].set(0.9), expected.set(0.9))
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        for head in ("sampling", "moments"):
            wrapped = uq.wrap(model, names["posterior"], head)
            parts = lightning.Trainer(**quiet).predict(names["Uncertain"](wrapped), loader)
            found = type(parts[0]).cat(parts).probs
            torch.testing.assert_close(found, wrapped.predict(loader, progress=False).probs)
        posterior = uq.fit(model.net, loader, prior_precision=1.0, progress=False)
        replaced = type(model)()
        replaced.net = uq.wrap(model.net, posterior)
        rows = torch.utils.data.DataLoader(loader.dataset.tensors[0], 40)
        parts = lightning.Trainer(**quiet).predict(replaced, rows)
        torch.testing.assert_close(parts[0].probs, replaced.net(next(iter(rows))).probs)

        class Fits(lightning.Callback):  # type: ignore[misc, name-defined]
            def on_fit_end(self, trainer: Any, module: Any) -> None:
                self.posterior = uq.fit(module, trainer.train_dataloader, prior_precision=1.0, progress=False)

        fits = Fits()
        lightning.Trainer(max_epochs=1, callbacks=[fits], **quiet).fit(model, names["train_loader"])
    assert [*fits.posterior.layers] == ["net"]
