"""The server: answers equal the library's, bad requests get one sentence, nobody is kept out."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import CODE, failure, make_images, net, run_json
from PIL import Image
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq.app import (
    FolderImages,
    ModelSource,
    Monitor,
    ScoreLog,
    image_files,
    read_scores,
    transform_of,
)
from posthoc_uq.app.cli.images import Trouble

pytest.importorskip("starlette")

import httpx
import uvicorn
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from posthoc_uq.app import Limits, Refused, Service, application
from posthoc_uq.app import serve as serving
from posthoc_uq.app.serve import LOOPBACK, Connection
from posthoc_uq.likelihoods import ConformalScores

NAMES = ("cat", "dog", "emu")
REFERRAL = uq.Referral(0.3)
LIMITS = Limits(bytes=200_000, batch=8, pixels=10_000)


def _png(width: int = 14, height: int = 12, seed: int = 0, kind: str = "png") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def predictor() -> uq.Predictor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = net()
        x, y = torch.rand(60, 3, 12, 12), torch.randint(3, (60,))
        posterior = uq.fit(model, [(x, y)], progress=False)
        posterior = uq.calibrate(
            posterior, [(x, y)], share=None, head="sampling", n_samples=5, progress=False
        )
    return uq.wrap(model, posterior)


@pytest.fixture(scope="module")
def transform(predictor: uq.Predictor) -> Any:
    return transform_of(predictor.model, ModelSource(model="nets.py:net"))


@pytest.fixture
def service(predictor: uq.Predictor, transform: Any) -> Service:
    return Service(predictor, transform, names=NAMES, referral=REFERRAL, limits=LIMITS)


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(application(service), base_url="http://localhost") as client:
        yield client


def _expected(predictor: uq.Predictor, prediction: Any, index: int) -> dict[str, Any]:
    """An answer as the library has it."""
    top = prediction.top_k(3)
    reasons = REFERRAL.reasons(prediction)
    labels = top.labels[index].tolist()
    return {
        "prediction": NAMES[labels[0]],
        "index": labels[0],
        "top": [
            {"label": NAMES[label], "index": label, "probability": probability}
            for label, probability in zip(labels, top.probabilities[index].tolist(), strict=True)
        ],
        "entropy": float(prediction.entropy()[index]),
        "mutual_information": float(prediction.mutual_information()[index]),
        "novelty": float(prediction.novelty()[index]),
        "referred": bool(REFERRAL(prediction)[index]),
        "reasons": [name for name, flags in reasons.items() if flags[index]],
        "tail": float(REFERRAL.tail(prediction)[index]),
        "set": [NAMES[i] for i, held in enumerate(prediction.set(0.95)[index]) if held],
        "level": 0.95,
        "familiarity": float(prediction.familiarity()[index]),
    }


def _rounded(answer: Any) -> Any:
    """An answer, without the last digits of its numbers: they depend on how many inputs are predicted at once."""
    if isinstance(answer, dict):
        return {key: _rounded(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [_rounded(value) for value in answer]
    return pytest.approx(answer, rel=1e-4, abs=1e-6) if type(answer) is float else answer


class TestAnswers:
    def test_numbers_are_predicted_as_by_the_library(
        self, client: TestClient, predictor: uq.Predictor
    ) -> None:
        x = torch.rand(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))
        for row in x:
            answer = client.post("/predict", json={"input": row.tolist()})
            assert answer.status_code == 200
            assert answer.json() == _expected(predictor, predictor(row[None]), 0)
        batch = client.post("/predict/batch", json={"inputs": x.tolist()}).json()["predictions"]
        assert batch == [_expected(predictor, predictor(x), index) for index in range(4)]

    @pytest.mark.parametrize("kind", ["png", "jpeg"])
    def test_an_image_is_prepared_as_predict_does(
        self, client: TestClient, predictor: uq.Predictor, transform: Any, tmp_path: Path, kind: str
    ) -> None:
        contents = [_png(seed=seed, kind=kind) for seed in range(2)]
        for number, content in enumerate(contents):
            (tmp_path / f"{number}.{kind}").write_bytes(content)
        items = FolderImages(str(tmp_path), image_files(str(tmp_path)), None, transform)
        inputs = torch.stack([items[i][0] for i in range(2)])
        expected = _expected(predictor, predictor(inputs[:1]), 0)
        raw = client.post("/predict/image", content=contents[0], headers={"Content-Type": f"image/{kind}"})
        assert raw.json() == expected
        form = client.post("/predict/image", files={"image": ("a", contents[0], f"image/{kind}")})
        assert form.json() == expected
        batch = client.post("/predict/batch", files=[("image", (f"{i}", c)) for i, c in enumerate(contents)])
        both = predictor(inputs)
        assert batch.json()["predictions"] == [_expected(predictor, both, i) for i in range(2)]

    def test_other_modes_of_images_are_converted(self, client: TestClient) -> None:
        for mode in ("L", "P", "RGBA", "I;16", "1"):
            buffer = BytesIO()
            Image.new(mode, (12, 12)).save(buffer, "png")
            answer = client.post(
                "/predict/image", content=buffer.getvalue(), headers={"Content-Type": "image/png"}
            )
            assert answer.status_code == 200, (mode, answer.text)

    def test_many_clients_at_once_get_the_same(self, client: TestClient, predictor: uq.Predictor) -> None:
        x = torch.rand(12, 3, 12, 12, generator=torch.Generator().manual_seed(2))
        expected = [_expected(predictor, predictor(row[None]), 0) for row in x]
        with ThreadPoolExecutor(6) as pool:
            found = list(
                pool.map(lambda row: client.post("/predict", json={"input": row.tolist()}).json(), x)
            )
        assert found == [_rounded(answer) for answer in expected]

    def test_requests_that_wait_are_predicted_together_and_none_spoils_the_others(
        self, service: Service, predictor: uq.Predictor
    ) -> None:
        x = torch.rand(9, 3, 12, 12, generator=torch.Generator().manual_seed(2))
        bodies = [{"input": row.tolist()} for row in x]
        bodies[3], bodies[5] = {"input": [1.0, 2.0]}, {"input": (1e38 * (x[5] - 0.5)).tolist()}
        held, batches = threading.Event(), list[int]()
        with pytest.MonkeyPatch.context() as patch:
            real = service._predicted

            def predicted(inputs: torch.Tensor) -> Any:
                held.wait(20)
                batches.append(len(next(iter(inputs.values()))))
                return real(inputs)

            patch.setattr(service, "_predicted", predicted)
            headers = Headers({"content-type": "application/json"})

            async def asked() -> list[Any]:
                sent = [(json.dumps(body).encode(), headers, False) for body in bodies]
                sent.append((json.dumps({"inputs": x[:5].tolist()}).encode(), headers, True))
                tasks = [asyncio.ensure_future(service.predict(*each)) for each in sent]
                await asyncio.sleep(0)  # all but the last wait now
                held.set()
                return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)

            found = asyncio.run(asked())
            assert isinstance(found[3], Refused) and isinstance(found[5], Refused)
            for index in {*range(9)} - {3, 5}:
                [answer] = found[index]
                assert answer == _rounded(_expected(predictor, predictor(x[index : index + 1]), 0))
            assert len(found[9]) == 5
        assert batches[0] == 1 and max(batches[1:]) <= service.limits.batch
        assert batches[1] > 1 and service.metrics.inputs._value.get() == 7 + 5

    def test_of_a_regression(self) -> None:
        x = torch.randn(40, 2, generator=torch.Generator().manual_seed(3))
        model = nn.Linear(2, 2)
        posterior = uq.fit(
            model, [(x, x.flip(1))], likelihood="regression", noise_variance=0.2, progress=False
        )
        predictor = uq.wrap(model, posterior)
        client = TestClient(application(Service(predictor), None))
        answers = client.post("/predict/batch", json={"inputs": x[:3].tolist()}).json()["predictions"]
        prediction = predictor(x[:3])
        lower, upper = prediction.interval(0.95)
        for index, answer in enumerate(answers):
            assert answer["mean"] == prediction.mean[index].tolist()
            assert answer["standard_deviation"] == prediction.standard_deviation[index].tolist()
            assert [answer["lower"], answer["upper"]] == [lower[index].tolist(), upper[index].tolist()]
            assert answer["level"] == 0.95 and answer["referred"] is None
        image = client.post("/predict/image", content=_png(), headers={"Content-Type": "image/png"})
        assert image.status_code == 415

    def test_a_referral_by_rank_is_refused_and_one_by_accuracy_judges_each_input(self, predictor) -> None:
        with pytest.raises(uq.PosthocUQError, match="answers inputs one by one"):
            Service(predictor, referral=uq.Referral(0.1, exactly=True))
        with pytest.raises(uq.PosthocUQError, match="needs more held-out samples"):
            Service(predictor, referral=uq.Referral(0.001))
        referral = uq.Referral(accuracy=0.1, confidence=0.6)
        client = TestClient(application(Service(predictor, None, referral=referral), None))
        x = torch.rand(6, 3, 12, 12, generator=torch.Generator().manual_seed(8))
        answers = client.post("/predict/batch", json={"inputs": x.tolist()}).json()["predictions"]
        assert [answer["referred"] for answer in answers] == referral(predictor(x)).tolist()

    def test_of_several_labels_and_of_positions(self) -> None:
        x = torch.rand(20, 3, 6, 6, generator=torch.Generator().manual_seed(4))
        labels = torch.randint(2, (20, 3), generator=torch.Generator().manual_seed(5)).float()
        tagger = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 3))
        posterior = uq.fit(tagger, [(x, labels)], likelihood="multilabel", layers="last", progress=False)
        predictor = uq.wrap(tagger, posterior)
        client = TestClient(application(Service(predictor, None, names=NAMES), None))
        answer = client.post("/predict", json={"input": x[0].tolist()}).json()
        probs = predictor(x[:1]).probs[0].tolist()
        assert answer["prediction"] == [n for n, p in zip(NAMES, probs, strict=True) if p >= 0.5]
        assert [entry["probability"] for entry in answer["top"]] == sorted(probs, reverse=True)
        pixels = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1))
        classes = torch.randint(3, (20, 6, 6), generator=torch.Generator().manual_seed(6))
        posterior = uq.fit(pixels, [(x, classes)], layers="last", progress=False)
        predictor = uq.wrap(pixels, posterior)
        client = TestClient(application(Service(predictor, None, names=NAMES), None))
        answer = client.post("/predict", json={"input": x[0].tolist()}).json()
        prediction = predictor(x[:1])
        shares = {entry["label"]: entry["share"] for entry in answer["shares"]}
        for index, name in enumerate(NAMES):
            share = (prediction.predicted()[0] == index).double().mean()
            assert shares[name] == pytest.approx(float(share), abs=1e-6)
        assert answer["entropy"] == float(prediction.scores()["entropy"][0])
        assert "set" not in answer and answer["referred"] is None

    @pytest.mark.parametrize("kind", ["pixels", "tokens"])
    def test_of_promises_at_positions(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sets position by position, p-values of inputs, as the library has them; maps are bounded."""
        x = torch.rand(80, 3, 4, 5, generator=torch.Generator().manual_seed(4))
        labels = (x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5))).argmax(1)
        model: nn.Module = nn.Conv2d(3, 3, 1)
        likelihood = uq.Categorical()
        if kind == "tokens":
            x, labels, model = x[:, :, 0].movedim(1, -1), labels[:, 0], nn.Linear(3, 3)
            likelihood = uq.Categorical(class_dim=-1)
        posterior = uq.fit(
            model, [(x[:20], labels[:20])], likelihood=likelihood, prior_precision=1.0, progress=False
        )
        posterior = uq.calibrate(posterior, [(x[20:], labels[20:])], link="probit", progress=False)
        predictor = uq.wrap(model, posterior)
        service = Service(predictor, None, names=NAMES, level=0.9, referral=uq.Referral(0.1))
        client = TestClient(application(service, None))
        answers = client.post("/predict/batch", json={"inputs": x[:3].tolist()}).json()["predictions"]
        prediction = predictor(x[:3])
        sets = prediction.set(0.9).movedim(prediction.layout.class_dim, -1)
        for index, answer in enumerate(answers):
            own = sets[index].flatten(0, -2)
            places = [answer["set"], answer["prediction"]]
            assert answer["positions"] == list(labels.shape[1:]) and answer["level"] == 0.9
            if kind == "pixels":
                places = [[entry for row in place for entry in row] for place in places]
            assert places[0] == [[NAMES[c] for c in range(3) if row[c]] for row in own]
            assert places[1] == [NAMES[c] for c in prediction.predicted()[index].flatten()]
            assert answer["set_size"] == pytest.approx(float(own.sum()) / len(own))
            assert answer["familiarity"] == float(prediction.familiarity()[index])
            assert answer["tail"] == float(uq.Referral(0.1).tail(prediction)[index])
        masked = prediction.masked(labels[:3] != labels[0].flatten()[0])
        (answer, *_) = [answer for answer, _ in serving._answers(service, masked)]
        flat = answer["set"] if kind == "tokens" else [entry for row in answer["set"] for entry in row]
        counted = masked.mask[0].flatten().tolist()
        assert [entry is not None for entry in flat] == counted and False in counted
        left = masked.predicted()[0][masked.mask[0]]
        assert answer["shares"][0]["share"] == pytest.approx(
            float((left == left.mode().values).double().mean())
        )
        monkeypatch.setattr("posthoc_uq.likelihoods.positions.MAX_ENTRIES", 3)
        answer = client.post("/predict", json={"input": x[0].tolist()}).json()
        assert "set_size" in answer and not {"set", "prediction"} & {*answer}


JSON = {"Content-Type": "application/json"}
PNG = {"Content-Type": "image/png"}
BAD = {
    "not json": ("/predict", b"{", JSON, 400, "not JSON"),
    "no utf-8": ("/predict", b"\xff\xfe{", JSON, 400, "not JSON"),
    "too deep": ("/predict", b'{"input":' + b"[" * 90_000, JSON, 400, "not JSON"),
    "nan": ("/predict", b'{"input": [NaN]}', JSON, 400, "NaN is no number"),
    "a list": ("/predict", b"[1]", JSON, 400, "one key 'input'"),
    "another key": ("/predict", b'{"inputs": [1]}', JSON, 400, "one key 'input'"),
    "ragged": ("/predict", b'{"input": [[1, 2], [3]]}', JSON, 400, "pad them to one length"),
    "text": ("/predict", b'{"input": ["a"]}', JSON, 400, "numbers alone"),
    "null": ("/predict", b'{"input": [null]}', JSON, 400, "numbers alone"),
    "booleans": ("/predict", b'{"input": [true]}', JSON, 400, "numbers alone"),
    "nothing": ("/predict", b'{"input": []}', JSON, 400, "numbers alone"),
    "too large a number": ("/predict", b'{"input": [1e300]}', JSON, 400, "too large"),
    "a huge integer": ("/predict", b'{"input": [' + b"9" * 5000 + b"]}", JSON, 400, ""),
    "another shape": ("/predict", b'{"input": [1, 2, 3]}', JSON, 422, "cannot be run"),
    "another type": ("/predict", b"{}", {"Content-Type": "text/plain"}, 415, "application/json"),
    "empty batch": ("/predict/batch", b'{"inputs": []}', JSON, 400, "a list of one"),
    "large batch": ("/predict/batch", b'{"inputs": [1,1,1,1,1,1,1,1,1]}', JSON, 413, "9 inputs"),
    "large body": ("/predict", b" " * 200_001, JSON, 413, "200,000 bytes"),
    "no image": ("/predict/image", b"hello", PNG, 415, "no PNG or JPEG"),
    "another format": ("/predict/image", _png(kind="gif"), PNG, 415, "no PNG or JPEG"),
    "cut image": ("/predict/image", _png()[:200], PNG, 400, "cannot be decoded"),
    "large image": ("/predict/image", _png(101, 100), PNG, 413, "10,100 pixels"),
    "type of image": ("/predict/image", b"GIF", {"Content-Type": "image/gif"}, 415, "image/png"),
    "no boundary": ("/predict/image", b"", {"Content-Type": "multipart/form-data"}, 400, "form"),
    "no form": ("/predict/image", b"x", {"Content-Type": "multipart/form-data; boundary=a"}, 400, "form"),
}


def _chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file."""
    return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")


class TestRefusals:
    @pytest.mark.parametrize("case", BAD)
    def test_a_bad_request_gets_one_sentence(self, client: TestClient, case: str) -> None:
        path, content, headers, status, words = BAD[case]
        answer = client.post(path, content=content, headers=headers)
        assert answer.status_code == status, answer.text
        sentence = answer.json()["error"]
        assert words in sentence and sentence.endswith(".") and "\n" not in sentence
        assert "Traceback" not in sentence and " at 0x" not in sentence and len(sentence) < 700
        assert "posthoc_uq_inputs_total 0.0" in client.get("/metrics").text

    def test_a_bomb_is_refused_before_it_is_decoded(self, client: TestClient) -> None:
        size = (20_000).to_bytes(4, "big")
        head = _chunk(b"IHDR", size + size + b"\1\0\0\0\0") + _chunk(b"IDAT", b"")
        answer = client.post("/predict/image", content=b"\x89PNG\r\n\x1a\n" + head, headers=PNG)
        assert answer.status_code == 413 and "too many pixels" in answer.json()["error"]

    @pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1), (2, 5000)])
    def test_a_strip_that_resizing_makes_huge_is_refused(
        self,
        client: TestClient,
        predictor: uq.Predictor,
        size: tuple[int, int],
        transform: Any,
        tmp_path: Path,
    ) -> None:
        strip = BytesIO()
        Image.new("1", size).save(strip, "png")
        answer = client.post("/predict/image", content=strip.getvalue(), headers=PNG)
        assert answer.status_code == 413 and f"{size[0]:,} x {size[1]:,} pixels" in answer.json()["error"]
        # the command line's folders; the longer side would have 2,240,000 pixels, or 560,000
        (tmp_path / "strip.png").write_bytes(strip.getvalue())
        resized = transform_of(predictor.model, ModelSource(model="nets.py:net", image_size=224))
        assert resized.shorter == 224 and transform.shorter == 0
        item = FolderImages(str(tmp_path), ["strip.png"], None, resized)[0]
        assert isinstance(item, Trouble) and "Crop it" in str(item) and not item.readable
        assert not isinstance(FolderImages(str(tmp_path), ["strip.png"], None, transform)[0], Trouble)

    def test_long_images_pass_where_they_stay_small(self, predictor: uq.Predictor, transform: Any) -> None:
        long = _png(16 * 12, 12)  # 16 times its shorter side, whatever the limit
        longer = _png(30 * 12, 12)
        for shorter, expected in ((0, (200, 200)), (512, (200, 413)), (12, (200, 200))):
            limits = Limits(pixels=10_000, shorter=shorter)
            client = TestClient(application(Service(predictor, transform, limits=limits), None))
            found = [
                client.post("/predict/image", content=c, headers=PNG).status_code for c in (long, longer)
            ]
            assert tuple(found) == expected, shorter

    def test_one_image_at_a_time_is_decoded(self, predictor: uq.Predictor, transform: Any) -> None:
        decoded: list[weakref.ref[Image.Image]] = []
        alive: list[int] = []

        def watching(image: Image.Image) -> torch.Tensor:
            alive.append(sum(ref() is not None for ref in decoded))
            decoded.append(weakref.ref(image))
            return transform(image)

        service = Service(predictor, watching, limits=LIMITS)
        client = TestClient(application(service, None))
        contents = [_png(seed=seed) for seed in range(8)]
        answer = client.post("/predict/batch", files=[("a", (str(i), c)) for i, c in enumerate(contents)])
        assert answer.status_code == 200 and alive == [0] * 8
        assert sum(ref() is not None for ref in decoded) == 0

    def test_images_of_a_form_are_bounded_together(
        self, client: TestClient, predictor: uq.Predictor, transform: Any
    ) -> None:
        files = [("a", ("a", _png(40, 40)))] * 6  # 28,800 numbers, and the limit is 30,000
        assert client.post("/predict/batch", files=files).status_code == 200
        answer = client.post("/predict/batch", files=[*files, files[0]])
        assert answer.status_code == 413 and "30,000 numbers" in answer.json()["error"]

        def small(image: Image.Image) -> Any:
            return transform(image.resize((12, 12)))

        client = TestClient(application(Service(predictor, small, limits=Limits(pixels=10_000)), None))
        files = [("a", ("a", _png(100, 100)))] * 8
        assert client.post("/predict/batch", files=files).status_code == 200
        answer = client.post("/predict/batch", files=[*files, files[0]])
        assert answer.status_code == 413 and "80,000 pixels together" in answer.json()["error"]

    def test_a_jpeg_of_many_scans_is_refused(self, client: TestClient) -> None:
        buffer = BytesIO()
        Image.new("RGB", (40, 40)).save(buffer, "jpeg", progressive=True)
        file = buffer.getvalue()
        last, end = file.rindex(b"\xff\xda"), file.rindex(b"\xff\xd9")
        marks = b"\xff\xda" * 500  # no scans in a comment, nor after the end
        comment = b"\xff\xfe" + (len(marks) + 2).to_bytes(2, "big") + marks
        for content, expected in (
            (file[:2] + comment + file[2:] + marks, 200),
            (file[:end] + file[last:end] * 50 + file[end:], 200),
            (file[:end] + file[last:end] * 200 + file[end:], 413),
        ):
            answer = client.post("/predict/batch", files={"a": content})
            assert answer.status_code == expected, answer.text
            assert expected == 200 or "scans; the limit is 100" in answer.json()["error"]

    def test_pictures_of_other_kinds(self, client: TestClient) -> None:
        """Several frames, large chunks of metadata, and texts that inflate, are answered or refused by a sentence."""
        frames, small = BytesIO(), _png()
        first, *more = (Image.new("RGB", (30, 30), (n, n, n)) for n in range(9))
        first.save(frames, "png", save_all=True, append_images=more)
        inflating = b"a\0\0" + zlib.compress(b" " * 2**26, 9)
        profile = b"\xff\xe2" + (60_000).to_bytes(2, "big") + b"ICC_PROFILE\0\1\1" + b"\0" * 59_984
        jpeg = _png(kind="jpeg")
        for content, expected in (
            (frames.getvalue(), 200),
            (small[:33] + _chunk(b"zTXt", inflating) + small[33:], 400),
            (small[:33] + _chunk(b"iCCP", inflating) + small[33:], 400),
            (small[:33] + _chunk(b"eXIf", b"\0" * 100_000) + small[33:], 200),
            (small[:33] + _chunk(b"teXt", b"") * 5000 + small[33:], 200),
            (jpeg[:2] + profile + jpeg[2:], 200),
        ):
            answer = client.post("/predict/batch", files={"a": content})
            assert answer.status_code == expected, answer.text
            assert expected == 200 or answer.json()["error"].startswith("The image cannot be decoded")

    def test_forms(self, client: TestClient) -> None:
        two = client.post("/predict/image", files=[("a", ("a", _png())), ("b", ("b", _png()))])
        assert two.status_code == 400 and "2 files" in two.json()["error"]
        many = client.post("/predict/batch", files=[("a", ("a", b"x"))] * 9)
        assert many.status_code == 413 and "Too many files" in many.json()["error"]
        sizes = client.post("/predict/batch", files=[("a", ("a", _png(9))), ("b", ("b", _png(8)))])
        assert sizes.status_code == 422 and "differ in size" in sizes.json()["error"]
        field = client.post("/predict/image", data={"a": "b"}, files={"c": ("c", _png())})
        assert field.status_code == 400

    def test_a_body_without_a_declared_length_is_cut_off(self, client: TestClient) -> None:
        sent = [0]

        def endless() -> Iterator[bytes]:
            while sent[0] < 10_000:
                sent[0] += 1
                yield b" " * 10_000

        assert client.post("/predict", content=endless(), headers=JSON).status_code == 413

    def test_addresses_and_methods(self, client: TestClient) -> None:
        assert client.get("/nothing").status_code == 404
        assert client.get("/predict").status_code == 405 and "POST" in client.get("/predict").json()["error"]
        assert client.post("/health").status_code == 405

    def test_a_host_is_a_name_with_a_port_and_nothing_else(
        self, client: TestClient, service: Service
    ) -> None:
        def status(*hosts: str, to: TestClient = client) -> int:
            return to.get("/health", headers=[("Host", host) for host in hosts]).status_code

        for host in ("127.0.0.1:9", "[::1]:9", "LOCALHOST"):
            assert status(host) == 200
        evil = client.get("/health", headers={"Host": "evil.example:8000"})
        assert evil.status_code == 421 and "--allow-host" in evil.json()["error"]
        parts = "evil.com:80@localhost localhost:80@evil.com me@localhost @localhost [::1]evil [::1 ::1 localhost:"
        more = "localhost:port localhost:80:80 localhost/x localhost?x localhost#x http://localhost"
        for host in (*parts.split(), *more.split(), "localhost, evil.com", ""):
            assert status(host) == 400, host
        assert status("localhost", "localhost") == 400
        anyone = TestClient(application(service, None))
        assert status("evil.com", to=anyone) == 200 and status("evil.com@localhost", to=anyone) == 400

    def test_posts_from_pages_of_other_sites_are_refused(self, service: Service) -> None:
        x = {"input": torch.zeros(3, 12, 12).tolist()}

        def status(*headers: tuple[str, str], hosts: Any = LOOPBACK) -> int:
            client = TestClient(application(service, hosts), base_url="http://localhost")
            return client.post("/predict", json=x, headers=list(headers)).status_code

        page, same = ("Origin", "http://localhost"), ("Sec-Fetch-Site", "same-origin")
        assert status() == status(("Origin", "http://localhost:3000")) == status(page, same) == 200
        origins = (
            "http://evil.com null localhost file:// http://localhost.evil.com http://evil.com:80@localhost"
        )
        for origin in (
            *origins.split(),
            "http://localhost@evil.com",
            "http://localhost, http://evil.com",
            "",
        ):
            assert status(("Origin", origin)) == status(("Origin", origin), same) == 403, origin
        assert status(page, ("Origin", "http://evil.com")) == 403
        for site in ("cross-site", "Cross-Site", "", "none, cross-site"):
            assert status(("Sec-Fetch-Site", site)) == 403, site
        proxied, anyone = ("localhost", "photos.example"), None
        assert status(("Origin", "https://photos.example"), hosts=proxied) == 200  # as --allow-host names it
        assert status(("Origin", "https://evil.com"), hosts=proxied) == 403
        assert (
            status(page, hosts=anyone) == 200 and status(("Origin", "http://evil.com"), hosts=anyone) == 403
        )

    def test_a_busy_server_says_so(self, client: TestClient, service: Service) -> None:
        x = {"input": torch.zeros(3, 12, 12).tolist()}
        places, service.places = service.places, asyncio.Semaphore(0)
        busy = client.post("/predict", json=x)
        assert busy.status_code == 503 and busy.headers["Retry-After"] == "1"
        service.places = places
        assert client.post("/predict", json=x).status_code == 200

    def test_a_body_has_a_time_to_arrive(self, predictor: uq.Predictor) -> None:
        app = application(Service(predictor, None, limits=Limits(seconds=0.05)), None)
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": b"{", "more_body": True}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/predict",
            "headers": headers,
            "query_string": b"",
        }
        asyncio.run(app({**scope, "http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send))
        assert sent[0]["status"] == 408

    def test_connections_that_keep_still_keep_nobody_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(serving, "CONNECTIONS", 8)
        monkeypatch.setattr(serving, "_GRACE", 0.0)
        begun, waiting = threading.Event(), threading.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive()).get("more_body"):
                pass
            while scope["path"] == "/slow" and not waiting.is_set():
                begun.set()
                await asyncio.sleep(0.01)
            headers = [(b"content-length", b"5000000")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"x" * 5_000_000})

        get = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
        slow = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nx"
        with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
            config = uvicorn.Config(app, http=Connection, lifespan="off", log_level="error")
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, args=([listening],))
            thread.start()

            def opened(sent: bytes) -> socket.socket:
                made = socket.create_connection(listening.getsockname(), timeout=20)
                stack.enter_context(made)
                made.sendall(sent)
                return made

            try:
                under_way = opened(slow.replace(b"/ ", b"/slow ").replace(b"9", b"1"))
                assert begun.wait(20)
                # more than there is room for, of each kind; the last ones do not read
                for sent in (b"", b"GET", slow, get):
                    for _ in range(20):
                        opened(sent)
                    assert opened(get).recv(12) == b"HTTP/1.1 200"
                assert len(server.server_state.connections) <= 10
                monkeypatch.setattr(serving, "CONNECTIONS", 100)
                monkeypatch.setattr(serving, "RECEIVED_BYTES", 300_000)
                large = slow.replace(b"9", b"999999") + b" " * 100_000
                kept = [opened(large) for _ in range(6)]  # no more than three of them at once
                assert opened(get).recv(12) == b"HTTP/1.1 200"
                for one in kept[:3]:
                    with suppress(ConnectionResetError):
                        assert one.recv(1) == b""
                waiting.set()
                assert under_way.recv(12) == b"HTTP/1.1 200"  # a whole request is not ended for another one
            finally:
                server.should_exit = server.force_exit = True
                thread.join()

    def test_a_fault_of_the_server_stays_in_its_log(
        self, client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any) -> Any:
            raise RuntimeError("secret")

        monkeypatch.setattr(service, "predictor", broken)
        answer = client.post("/predict", json={"input": [1]})
        assert answer.status_code == 500 and "secret" not in answer.text
        assert 'errors_total{kind="server"} 1.0' in client.get("/metrics").text

    def test_not_finite_predictions(self, predictor: uq.Predictor) -> None:
        client = TestClient(application(Service(predictor), None))
        answer = client.post("/predict", json={"input": torch.full((3, 12, 12), 3e38).tolist()})
        assert answer.status_code == 422 and "finite" in answer.json()["error"]

    def test_texts_that_the_model_cannot_take(self) -> None:
        classifier = _Encoder().eval()
        ids = torch.randint(9, (20, 3), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
        posterior = uq.fit(classifier, [batch], layers="last", prior_precision=1.0, progress=False)
        client = TestClient(application(Service(uq.wrap(classifier, posterior)), None))

        def answer(mask: list[int]) -> Any:
            return client.post(
                "/predict", json={"input": {"input_ids": [1] * len(mask), "attention_mask": mask}}
            )

        assert answer([1, 1, 0]).status_code == 200
        nothing = answer([0, 0, 0])  # for which torch's encoder raises an error of its own
        assert nothing.status_code == 422 and "not finite" in nothing.json()["error"]
        long = answer([1] * 7)
        assert long.status_code == 422
        assert re.search(
            r"must match.*\)\. Is a text longer than the model takes, or the mask of another length\?",
            long.json()["error"],
        )

    def test_whole_numbers(self) -> None:
        model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))
        tokens = torch.randint(9, (30, 3), generator=torch.Generator().manual_seed(0))
        posterior = uq.fit(model, [(tokens, tokens[:, 0] % 2)], layers="last", progress=False)
        predictor = uq.wrap(model, posterior)
        client = TestClient(application(Service(predictor), None))  # by what the fit kept
        answer = client.post("/predict", json={"input": [1, 2, 3]}).json()
        assert answer["entropy"] == float(predictor(torch.tensor([[1, 2, 3]])).entropy()[0])
        assert "whole numbers" in client.post("/predict", json={"input": [1.5, 2, 3]}).json()["error"]
        outside = client.post("/predict", json={"input": [1, 2, 30]})
        assert outside.status_code == 422
        # as in files of earlier versions
        predictor = uq.wrap(model, posterior.replaced(history=replace(posterior.history, inputs={})))
        client = TestClient(application(Service(predictor, integers=True), None))
        assert client.post("/predict", json={"input": [1, 2, 3]}).json() == answer
        assert "does not know the names" in client.post("/predict", json={"input": {"x": 1}}).json()["error"]


class _Encoder(nn.Module):
    """A classifier of texts of up to four tokens; the mean over none is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places, self.head = (
            nn.Embedding(9, 8),
            nn.Parameter(torch.ones(4, 8)),
            nn.Linear(8, 2),
        )
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.table(input_ids) + self.places[: input_ids.shape[1]]
        states = self.encoder(states, src_key_padding_mask=attention_mask == 0)
        counted = attention_mask.unsqueeze(-1).to(states.dtype)
        return self.head((states * counted).sum(1) / counted.sum(1))


class _Tokens(nn.Module):
    """Takes tokens and a mask by name, whole numbers, and by place a weight for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        states = (self.table(ids) * mask.unsqueeze(-1)).sum(1)  # fails where the mask is no number of its own
        return self.head(states) * weight.unsqueeze(1)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> uq.Predictor:
    model, path = _Tokens(), tmp_path_factory.mktemp("tokens") / "m.h5"
    ids = torch.randint(9, (30, 3), generator=torch.Generator().manual_seed(0))
    batch = ((torch.rand(30), ids, ids > 2), ids[:, 0] % 2)
    uq.save(uq.fit(model, [batch], layers="last", prior_precision=1.0, progress=False), path)
    posterior = uq.load(path, model)
    assert {name: about.plain() for name, about in posterior.history.inputs.items()} == {
        "weight": {"type": "float32", "place": 0},
        "ids": {"type": "int64", "place": 1},
        "mask": {"type": "bool", "place": 2},
    }
    assert "ids int64" in str(uq.inspect(path))
    return uq.wrap(model, posterior)


class TestNames:
    def test_several_inputs_by_their_names(self, tokens: uq.Predictor) -> None:
        client = TestClient(application(Service(tokens), None))
        one = {"ids": [1, 2, 3], "mask": [True, True, False], "weight": 2}
        two = {"mask": [1, 1, 1], "weight": 0.5, "ids": [4, 0, 8]}
        inputs = (
            torch.tensor([2, 0.5]),
            torch.tensor([[1, 2, 3], [4, 0, 8]]),
            torch.tensor([[True, True, False], [True, True, True]]),
        )
        wanted = tokens(*inputs).entropy().tolist()
        found = client.post("/predict/batch", json={"inputs": [one, two]}).json()["predictions"]
        assert [answer["entropy"] for answer in found] == wanted
        for body in ({"input": one}, one):
            assert client.post("/predict", json=body).json()["entropy"] == pytest.approx(wanted[0], rel=1e-5)
        assert client.get("/health").json()["inputs"] == {"weight": "float32", "ids": "int64", "mask": "bool"}

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"ids": [1, 2.0, 3]}, "'ids' must hold whole numbers"),
            ({"ids": [1, True, 3]}, "'ids' must hold numbers alone"),
            ({"ids": [1, 2**70, 3]}, "'ids' must hold numbers alone"),
            ({"ids": [1, 2**63, 3]}, "'ids' must hold whole numbers, of torch.int64"),
            ({"ids": [[1, 2], [3]]}, "'ids' differ in length"),
            ({"ids": {"a": 1}}, "'ids' must hold numbers alone"),
            ({"ids": [1, 2, 30]}, "rows 0 to 8, and was given ids from 1 to 30"),
            ({"mask": [1, 2, 1]}, "'mask' has a number that torch.bool does not hold"),
            ({"mask": [True, True]}, r"mask=bool \(1, 2\)|bool \(1, 2\)"),
            ({"weight": "2"}, "'weight' must hold numbers alone"),
            ({"weight": 1e39}, "'weight' has a number that is too large"),
            ({"token": 1}, 'has \'token\', which the model does not take; send .*"weight": ..., "ids": ...'),
            ({"ids": None}, "numbers alone"),
        ],
    )
    def test_wrong_ones_get_a_sentence(self, tokens: uq.Predictor, change: dict[str, Any], said: str) -> None:
        client = TestClient(application(Service(tokens), None))
        one = {"ids": [1, 2, 3], "mask": [True, True, False], "weight": 2}
        answer = client.post("/predict", json={"input": one | change})
        assert 400 <= answer.status_code < 500 and re.search(said, answer.json()["error"])

    def test_what_is_no_row_of_names(self, tokens: uq.Predictor) -> None:
        client = TestClient(application(Service(tokens, lambda image: image), None))
        one = {"ids": [1, 2, 3], "mask": [True, True, False], "weight": 2}
        longer = {"ids": [1, 2, 3, 4], "mask": 4 * [True], "weight": 2}
        for inputs, said in (
            ([one, longer], "'ids' differ in length"),
            ([one, [1, 2]], "with names and without"),
            ([one, {"ids": [1, 2, 3]}], "lacks 'weight'"),
            ([[1, 2, 3]], "must name the model's inputs"),
        ):
            answer = client.post("/predict/batch", json={"inputs": inputs})
            assert answer.status_code == 400 and said in answer.json()["error"]
        wrong = client.post("/predict", json={"id": [1, 2, 3], "weights": 2})
        assert wrong.status_code == 400
        assert "'id', which the model does not take; send" in wrong.json()["error"]
        image = client.post("/predict/image", content=_png(), headers=PNG)
        assert image.status_code == 415 and "more than images" in image.json()["error"]
        assert client.get("/health").json()["images"] is False

    def test_a_table_by_its_columns(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(40, 3)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        posterior = uq.fit(model, [(x, (x[:, 0] > 0).long())], prior_precision=1.0, progress=False)
        posterior = posterior.noted(
            fit={"table columns": ["age", "height", "income"]}
        )  # as the command keeps them
        predictor = uq.wrap(model, posterior)
        client = TestClient(application(Service(predictor, lambda image: image), None))
        rows = [{"age": 3, "height": 1.5, "income": -2}, {"income": 1, "age": 0, "height": 0.25}]
        wanted = predictor(torch.tensor([[3, 1.5, -2], [0, 0.25, 1]])).entropy().tolist()
        found = client.post("/predict/batch", json={"inputs": rows}).json()["predictions"]
        assert [answer["entropy"] for answer in found] == wanted
        for body in (
            rows[0],
            {"input": rows[0]},
            {"input": [3, 1.5, -2]},
            {"input": {"input": [3, 1.5, -2]}},
        ):
            assert client.post("/predict", json=body).json()["entropy"] == pytest.approx(wanted[0], rel=1e-5)
        for change, said in (
            ({"age": [3]}, "'age' must be one number"),
            ({"age": None}, "'age' must hold numbers alone"),
            ({"age": True}, "'age' must hold numbers alone"),
            ({"ages": 3}, "has 'ages', which the model does not take"),
        ):
            answer = client.post("/predict", json=rows[0] | change)
            assert answer.status_code == 400 and said in answer.json()["error"]
        wrong = client.post("/predict", json={"years": 3, "tall": 1.5})
        assert wrong.status_code == 400 and "'years', which the model does not take" in wrong.json()["error"]
        assert client.get("/health").json()["images"] is False
        image = client.post("/predict/image", content=_png(), headers=PNG)
        assert image.status_code == 415 and "takes no images: send JSON" in image.json()["error"]


class TestWhatIsKept:
    def test_metrics_and_health(self, client: TestClient, predictor: uq.Predictor) -> None:
        x = torch.rand(6, 3, 12, 12, generator=torch.Generator().manual_seed(7))
        answers = client.post("/predict/batch", json={"inputs": x.tolist()}).json()["predictions"]
        client.post("/predict", content=b"{", headers=JSON)
        response = client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=")
        values = dict(re.findall(r"^(posthoc_uq_\S+) (\S+)$", response.text, re.M))
        assert values["posthoc_uq_inputs_total"] == "6.0"
        assert float(values["posthoc_uq_referred_total"]) == sum(a["referred"] for a in answers)
        assert values['posthoc_uq_requests_total{endpoint="/predict",status="400"}'] == "1.0"
        assert values['posthoc_uq_errors_total{kind="json"}'] == "1.0"
        assert values["posthoc_uq_entropy_nats_count"] == values["posthoc_uq_novelty_count"] == "6.0"
        # a monitor of the posterior's held-out scores has the same evidence
        promises = predictor.promises
        assert isinstance(promises, ConformalScores)
        kept = {name: scores for name, scores in promises.inputs.items() if name in answers[0]}
        monitor = Monitor(kept)
        monitor.add({name: [answer[name] for answer in answers] for name in kept})
        for name, evidence in monitor.evidence.items():
            assert float(values[f'posthoc_uq_drift{{score="{name}"}}']) == pytest.approx(evidence)
        total = float(values["posthoc_uq_entropy_nats_sum"])
        assert total == pytest.approx(sum(a["entropy"] for a in answers))
        assert values['posthoc_uq_request_seconds_count{endpoint="/predict/batch"}'] == "1.0"
        health = client.get("/health").json()
        assert (
            health["status"] == "ok"
            and health["images"] is True
            and health["head"] == "sampling"
            and health["referral"] == "Referral(rate=0.3, score='joint')"
        )

    def test_drift_is_that_from_scores_at_the_temperature_of_the_held_out_ones(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(460, 3, generator=generator)
        y = (x[:, 0] + torch.randn(460, generator=generator) > 0).long()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        for parameter in model.parameters():
            parameter.data *= 4  # far too sure
        posterior = uq.fit(model, [(x[:100], y[:100])], "kfac", layers="last", progress=False)
        posterior = uq.calibrate(posterior, [(x[100:160], y[100:160])], progress=False)
        predictor = uq.wrap(model, posterior)
        promises, prediction = predictor.promises, predictor(x[160:])
        assert isinstance(promises, ConformalScores)
        own, judged = prediction.scores()["entropy"], prediction.at_promises().scores()
        assert promises.retuned and float((own - judged["entropy"]).abs().max()) > 0.01
        client = TestClient(application(Service(predictor), None), base_url="http://localhost")
        for part in x[160:].split(50):
            client.post("/predict/batch", json={"inputs": part.tolist()}).raise_for_status()
        values = dict(re.findall(r"^(posthoc_uq_\S+) (\S+)$", client.get("/metrics").text, re.M))
        monitor = Monitor({name: promises.inputs[name] for name in ("entropy", "novelty")})
        monitor.add({name: judged[name].detach() for name in ("entropy", "novelty")})
        for name, evidence in monitor.evidence.items():
            assert float(values[f'posthoc_uq_drift{{score="{name}"}}']) == pytest.approx(evidence, rel=1e-3)

    def test_nothing_is_written_without_a_log(
        self, client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("tempfile.SpooledTemporaryFile.rollover", lambda self: pytest.fail("a file"))
        big = BytesIO()
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 100, 3)).astype(np.uint8)).save(
            big, "png"
        )
        for _ in range(5):
            client.post("/predict/batch", files=[("a", ("a", big.getvalue()))] * 6)
        assert list(tmp_path.iterdir()) == []

    def test_the_log(self, predictor: uq.Predictor, transform: Any, tmp_path: Path) -> None:
        path = tmp_path / "log.csv"
        answers: list[dict[str, Any]] = []
        for start in (0, 5):  # the second server goes on with the first one's log
            service = Service(predictor, transform, names=NAMES, referral=REFERRAL, log=str(path))
            with TestClient(application(service, None)) as client:
                for seed in range(start, start + 5):
                    answers.append(
                        client.post("/predict/image", files={"a": ("secret.png", _png(seed=seed))}).json()
                    )
        assert path.stat().st_mode & 0o77 == 0 and "secret" not in path.read_text()
        scores = read_scores(str(path))
        assert scores.values["novelty"] == pytest.approx([a["novelty"] for a in answers], rel=1e-5)
        assert scores.referred.tolist() == [a["referred"] for a in answers]
        (tmp_path / "other.csv").write_text("a,b\n")
        with pytest.raises(uq.PosthocUQError, match="other columns"):
            ScoreLog(str(tmp_path / "other.csv"))

    def test_a_log_that_was_moved_or_deleted_begins_anew(
        self, predictor: uq.Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = list[str]()
        monkeypatch.setattr(serving.log, "error", lambda text, *values: said.append(text % values))
        path = tmp_path / "logs" / "log.csv"
        path.parent.mkdir()
        service = Service(predictor, log=str(path))
        x = torch.rand(3, 12, 12).tolist()
        with TestClient(application(service, None)) as client, serving._on_hangup(service.reopen_log):

            def ask() -> int:
                return client.post("/predict", json={"input": x}).status_code

            ask()
            path.rename(tmp_path / "moved.csv")
            ask()
            assert [len(read_scores(str(p))) for p in (path, tmp_path / "moved.csv")] == [1, 1]
            path.unlink()
            ask()
            ask()
            assert len(read_scores(str(path))) == 2 and path.stat().st_mode & 0o77 == 0
            path.rename(tmp_path / "again.csv")
            if hasattr(signal, "SIGHUP"):
                signal.raise_signal(signal.SIGHUP)
                assert path.exists()
            else:
                ask()
            path.unlink()
            path.write_text("a,b\n")  # another program's
            assert ask() == 200 and path.read_text() == "a,b\n" and "other columns" in said[0]
            assert 'posthoc_uq_errors_total{kind="log"} 1.0' in client.get("/metrics").text
            path.unlink()
            ask()
            assert len(read_scores(str(path))) == 1
        if hasattr(signal, "SIGHUP"):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
            with serving._on_hangup(Service(predictor).reopen_log):
                assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, predictor: uq.Predictor) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "nets.py").write_text(CODE)
    torch.save(predictor.model.state_dict(), folder / "w.pt")
    uq.save(predictor.posterior, folder / "m.h5")
    make_images(folder / "held", ("",), 24, 1)
    make_images(folder / "new", ("",), 24, 2)
    return folder


def _model(place: Path) -> list[Any]:
    return ["--model", f"{place}/nets.py:net", "--weights", place / "w.pt"]


def test_the_command_serves(place: Path, predictor: uq.Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[uvicorn.Server] = []
    answers: list[Any] = []

    def ask(self: uvicorn.Server, sockets: Any = None) -> None:
        servers.append(self)
        self.install_signal_handlers = lambda: None  # type: ignore[method-assign]
        thread = threading.Thread(target=original, args=(self, sockets))
        thread.start()
        port = sockets[0].getsockname()[1]
        content = (place / "new" / "0.png").read_bytes()
        answers.append(
            httpx.post(
                f"http://127.0.0.1:{port}/predict/image", content=content, headers=PNG, trust_env=False
            ).json()
        )
        self.should_exit = True
        thread.join()

    original = uvicorn.Server.run
    monkeypatch.setattr(uvicorn.Server, "run", ask)
    names = place / "names.txt"
    names.write_text("\n".join(NAMES))
    common = [place / "m.h5", *_model(place), "--port 0 --referral-rate 0.3"]
    printed = run_json("serve", *common, "--class-names", names)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", printed["url"])
    image = torch.from_numpy(np.asarray(Image.open(place / "new" / "0.png")).copy()).permute(2, 0, 1)
    assert answers == [_rounded(_expected(predictor, predictor(image[None].float() / 255), 0))]
    assert servers[0].config.http is Connection
    names.write_text("a\nb")
    assert "2 class names" in failure("serve", *common, "--class-names", names)
    assert "cannot be listened on" in failure("serve", *common, "--host", "256.0.0.1")
    assert "There is no file" in failure("serve", place / "no.h5", *_model(place))
    assert json.dumps(printed)


def test_connections_that_cannot_be_ended_yet_keep_nobody_out(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS", 2)
    monkeypatch.setattr(serving, "_GRACE", 60.0)
    answers, asking = list[int](), list[threading.Thread]()

    def ask(url: str) -> None:
        try:
            with ExitStack() as stack:
                address = url.removeprefix("http://").rsplit(":", 1)
                for _ in range(8):
                    idle = socket.create_connection((address[0], int(address[1])), timeout=20)
                    stack.enter_context(idle)
                answers.append(httpx.get(f"{url}/health", trust_env=False).status_code)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    def started(url: str) -> None:
        asking.append(threading.Thread(target=ask, args=(url,)))
        asking[0].start()

    with pytest.raises(KeyboardInterrupt):
        serving.serve(service, port=0, started=started)
    asking[0].join()
    assert answers == [200]


def test_two_interrupts_end_the_server_without_tracebacks(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While an answer is under way, which the second does not wait for."""
    answers, begun = list[int](), threading.Event()

    def slow(*_: Any) -> None:
        begun.set()
        time.sleep(1.0)

    def ask(url: str) -> None:
        answers.append(httpx.post(f"{url}/predict", json={"input": [0]}, trust_env=False).status_code)

    def interrupt() -> None:
        assert begun.wait(30)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    monkeypatch.setattr(service, "_answer", slow)
    interrupting = threading.Thread(target=interrupt)
    asking: list[threading.Thread] = []

    def started(url: str) -> None:
        asking.append(threading.Thread(target=ask, args=(url,)))
        for thread in (*asking, interrupting):
            thread.start()

    with pytest.raises(KeyboardInterrupt):
        serving.serve(service, port=0, started=started)
    for thread in (*asking, interrupting):
        thread.join()
    assert answers == [503] and "Traceback" not in capsys.readouterr().err
