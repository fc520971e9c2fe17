"""One predictor for many clients: a few threads, one lock around the model, and what is kept of the answers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.referral import referral_applies
from posthoc_uq.monitoring.page import monitor_page
from posthoc_uq.monitoring.pictures import Pictures
from posthoc_uq.monitoring.records import Records, ScoreLog
from posthoc_uq.posteriors.referral import rule_of
from posthoc_uq.predictions.base import Prediction
from posthoc_uq.serving.answers import Answer, Form, answers_of
from posthoc_uq.serving.metrics import Metrics
from posthoc_uq.serving.refusals import Refused, shortened
from posthoc_uq.serving.requests import Limits, numbers_of, opened_image, prepared, prepared_image

log = logging.getLogger("posthoc_uq.serving")

_NOVEL = ("novelty", "mutual_information", "standard_deviation", "entropy")
_REUSED = 2.0  # seconds for which a live page is shown again


@dataclass(frozen=True)
class Settings:
    """How a server answers, and what it keeps.

    Attributes:
        names: of classes or labels, or None for their numbers.
        top_k: classes in an answer.
        level: of intervals.
        limits: of one request.
        workers: threads that decode and predict; the model itself runs in one at a time.
        queue: requests under way, each with its whole body; more are told to come again.
        integers: inputs of JSON are whole numbers, such as tokens.
        remember: inputs whose scores the live page shows.
        window: inputs of a test of drift.
        log: a CSV file to which every input's scores are added, or None.
        keep_images: thumbnails of the most novel images that are kept, in memory, and beside `log` if there is one.
    """

    names: Sequence[str] | None = None
    top_k: int = 3
    level: float = 0.95
    limits: Limits = field(default_factory=Limits)
    workers: int = 2
    queue: int = 64
    integers: bool = False
    remember: int = 5000
    window: int = 200
    log: str | None = None
    keep_images: int = 0


class Service:
    """A predictor with what belongs to serving it.

    Args:
        predictor: from ``uq.wrap``.
        transform: from a Pillow image to an input; without one, images are refused.
        settings: see there.
        reference: held-out inputs for the live page.

    Raises:
        PosthocUQError: the log or the thumbnails cannot be written.
    """

    def __init__(
        self,
        predictor: Predictor,
        transform: Callable[[Any], Any] | None = None,
        settings: Settings | None = None,
        reference: Records | None = None,
    ) -> None:
        self.predictor, self.transform, self.reference = predictor, transform, reference
        self.settings = settings = settings or Settings()
        self.metrics = Metrics()
        self.under_way = 0  # requests, changed by the event loop alone
        self.pool = ThreadPoolExecutor(settings.workers, thread_name_prefix="predict")
        self._form = Form(settings.names, settings.top_k, settings.level, referral_applies(predictor))
        self._model, self._memory, self._drawing = Lock(), Lock(), Lock()
        self._rows: deque[dict[str, Any]] = deque(maxlen=settings.remember)
        self._log = None if settings.log is None else ScoreLog(settings.log)
        folder = None if settings.log is None else Path(f"{settings.log}.images")
        self._pictures = Pictures(settings.keep_images, folder) if settings.keep_images else None
        self._started = time.monotonic()
        self._page: tuple[float, str] | None = None
        floats = (p.dtype for p in predictor.model.parameters() if p.is_floating_point())
        self._dtype = torch.int64 if settings.integers else next(floats, torch.float32)

    def warm_up(self) -> None:
        """Predict a grey image once, so that the first client need not wait for what is made on first use. A model that
        takes no images is left alone.

        Raises:
            PosthocUQError: there are other names than classes.
        """
        if self.transform is None:
            return
        try:
            grey = prepared_image(Image.new("RGB", (256, 256), (128, 128, 128)), self.transform)
            answers_of(self.predictor, self._predicted(grey.unsqueeze(0)), self._form)
        except Refused:
            return

    def predict_numbers(self, body: bytes, many: bool) -> list[dict[str, Any]]:
        """Answers to a body of JSON; see `numbers_of`.

        Raises:
            Refused: the body is wrong, or the model does not take such inputs.
        """
        return self._answered(numbers_of(body, many, self.settings.limits, self._dtype), None)

    def predict_images(self, files: Sequence[bytes], kind: str | None = None) -> list[dict[str, Any]]:
        """Answers to image files; `kind` is the format that the request named.

        Raises:
            Refused: one is no image, or the model does not take it.
        """
        if self.transform is None:
            raise Refused(415, "image", "This server has no transform of images; send numbers as JSON.")
        return self._answered(prepared(files, self.transform, self.settings.limits, kind), files)

    def _answered(self, inputs: Tensor, files: Sequence[bytes] | None) -> list[dict[str, Any]]:
        prediction = self._predicted(inputs)
        answers = answers_of(self.predictor, prediction, self._form)
        self._remember(answers, files)
        return [answer.plain for answer in answers]

    def _predicted(self, inputs: Tensor) -> Prediction:
        try:
            with self._model, torch.no_grad(), self.metrics.model_seconds.time():
                return self.predictor(inputs.to(self.predictor.device)).to("cpu")
        except NonFiniteError as error:
            raise Refused(422, "finite", f"{shortened(error)}.") from None
        except PosthocUQError as error:
            raise Refused(422, "shape", f"{shortened(error, 600)}.") from None

    def _remember(self, answers: Sequence[Answer], files: Sequence[bytes] | None) -> None:
        """Count, keep and log; a full disk costs the record, not the answer."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        rows: list[dict[str, Any]] = []
        for index, answer in enumerate(answers):
            row: dict[str, Any] = {"time": now, "file": "", **answer.row}
            self.metrics.inputs.inc()
            self.metrics.referred.inc(1 if row["flag"] else 0)
            for name, histogram in (("entropy", self.metrics.entropy), ("novelty", self.metrics.novelty)):
                if row.get(name) is not None:
                    histogram.observe(row[name])
            score = next((row[name] for name in _NOVEL if row.get(name) is not None), None)
            try:
                pictures = self._pictures
                if files is not None and pictures is not None and score is not None and pictures.wants(score):
                    # decoded once more, so that not all images of a form are in memory until here
                    image = opened_image(files[index], self.settings.limits)
                    row["file"] = pictures.add(image, score, str(row.get("label_1") or ""))
            except OSError as error:
                self._not_kept(error)
            rows.append(row)
        with self._memory:
            self._rows.extend(rows)
            if self._log is not None:
                try:
                    self._log.add(rows)
                except OSError as error:
                    self._not_kept(error)

    def _not_kept(self, error: OSError) -> None:
        self.metrics.errors.labels("log").inc()
        log.error("The record of an input could not be kept: %s.", error)

    def page(self) -> str:
        """The live page; made at most every two seconds."""
        with self._drawing:
            now = time.monotonic()
            if self._page is None or now - self._page[0] > _REUSED:
                with self._memory:
                    rows = [{**row, "flag": _number(row["flag"])} for row in self._rows]
                pictures = [] if self._pictures is None else self._pictures.largest()
                text = monitor_page(
                    Records.of(rows),
                    self.reference,
                    pictures,
                    window=self.settings.window,
                    title=f"What comes in: {type(self.predictor.model).__name__}",
                    note=f"The last {len(rows):,} inputs of this server, up to {self.settings.remember:,}. The page "
                    f"loads itself again every 30 seconds.",
                    refresh=30,
                )
                self._page = now, text
            return self._page[1]

    def health(self) -> dict[str, Any]:
        """That it runs, and what it runs."""
        referral = self.predictor.posterior.history.referral
        limits = self.settings.limits
        return {
            "status": "ok",
            "model": type(self.predictor.model).__name__,
            "head": self.predictor.head,
            "likelihood": self.predictor.posterior.likelihood.name,
            "referral": rule_of(referral) if self._form.refers else None,
            "images": self.transform is not None,
            "limits": {"bytes": limits.bytes, "batch": limits.batch, "pixels": limits.pixels},
            "uptime_seconds": round(time.monotonic() - self._started, 1),
        }

    def close(self) -> None:
        """Finish what is under way; no more predictions."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        if self._log is not None:
            self._log.close()


def _number(flag: bool | None) -> Any:
    return "" if flag is None else int(flag)
