"""``posthoc-uq serve`` under load: are answers the library's own, does memory stay flat, how long does a client wait.

    OMP_NUM_THREADS=1 python benchmarks/serve_load.py
    OMP_NUM_THREADS=1 python benchmarks/serve_load.py --model small --size 12 --clients 1 8 64

The server runs in a process of its own on the loopback address. Every client sends one request after another on one
connection, numbers and PNG files in turn, and every answer is compared with the library's prediction of the same input,
up to rounding, since requests that wait are predicted together. "forward" is one pass of the bare model on one input in
memory, "prediction" the same through the predictor; both are measured while nothing else runs. The row "bare" is the
network alone behind the same framework: JSON in, one forward pass a request, softmax out. "processor" is the server's
processor time for one request, which says more than the clock where other work is done meanwhile. Memory is the
server's resident set after a tenth of the requests, and after all. Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import torch
from _cases import settle_batchnorm
from _harness import Row, machine, output_file, seconds, table, write_json
from PIL import Image
from torch import nn

import posthoc_uq as uq

MODEL = """
import torch
from torch import nn


def resnet():
    import torchvision

    return torchvision.models.resnet18(weights=None)


def small():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))
"""
DISTINCT, RATE = 16, 0.1
JSON, PNG = {"Content-Type": "application/json"}, {"Content-Type": "image/png"}


def prepared(folder: Path, name: str, size: int) -> tuple[list[str], uq.Predictor, nn.Module]:
    """A model with its weights and its posterior in files: the command's arguments, and both in this process."""
    (folder / "served.py").write_text(MODEL)
    names: dict[str, Any] = {}
    exec(MODEL, names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = names[name]()
        images = torch.rand(32, 3, size, size)
        labels = torch.randint(5, (32,))
    settle_batchnorm(model, images)
    model.eval()
    posterior = uq.fit(model, [(images, labels)], layers="last", prior_precision=1.0, progress=False)
    posterior = uq.calibrate(posterior, [(images, labels)], share=None, progress=False)
    predictor = uq.wrap(model, posterior)
    uq.save(posterior, folder / "m.h5")
    torch.save(model.state_dict(), folder / "w.pt")
    arguments = ["serve", str(folder / "m.h5"), "--model", f"{folder / 'served.py'}:{name}"]
    arguments += ["--weights", str(folder / "w.pt"), "--referral-rate", str(RATE), "--port", "0", "--json"]
    return arguments, predictor, model


def requests_of(
    predictor: uq.Predictor, size: int
) -> list[tuple[str, bytes, dict[str, str], dict[str, Any]]]:
    """Different requests, each with what the library says of its input."""
    random = np.random.default_rng(0)
    made: list[tuple[str, bytes, dict[str, str], dict[str, Any]]] = []
    for number in range(DISTINCT):
        pixels = random.integers(0, 256, (size, size, 3)).astype(np.uint8)
        x = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255
        if number % 2:
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "png")
            path, body, headers = "/predict/image", file.getvalue(), PNG
        else:
            path, body, headers = "/predict", json.dumps({"input": x.tolist()}).encode(), JSON
        prediction = predictor(x[None])
        expected = {
            "probabilities": prediction.top_k(3).probabilities[0].tolist(),
            "entropy": float(prediction.entropy()),
            "novelty": float(prediction.novelty()),
            "referred": bool(uq.Referral(RATE)(prediction)),
        }
        made.append((path, body, headers, expected))
    return made


def equal(found: Any, expected: Any) -> bool:
    """Whether numbers are the same up to rounding."""
    if isinstance(expected, bool):
        return found is expected
    return bool(np.allclose(found, expected, rtol=1e-4, atol=1e-6))


def bare(folder: str, name: str) -> None:
    """Serve the network alone, until the process is ended."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    torch.set_num_threads(1)
    names: dict[str, Any] = {}
    exec(MODEL, names)
    model: nn.Module = names[name]()
    model.load_state_dict(torch.load(Path(folder) / "w.pt"))
    model.eval()

    def answer(body: bytes) -> list[float]:
        with torch.no_grad():
            return model(torch.tensor([json.loads(body)["input"]])).softmax(-1)[0].tolist()

    async def predict(request: Request) -> JSONResponse:
        body = await request.body()
        return JSONResponse({"probabilities": await asyncio.to_thread(answer, body)})

    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as in the server
    print(json.dumps({"url": f"http://127.0.0.1:{listening.getsockname()[1]}"}), flush=True)
    app = Starlette(routes=[Route("/predict", predict, methods=["POST"])])
    config = uvicorn.Config(app, http="h11", log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


class Load:
    """Clients that send requests one after another; waits and wrong answers."""

    def __init__(self, url: str, requests: Sequence[Any]) -> None:
        self._address, self._requests = urlsplit(url).netloc, requests
        self.waits: list[float] = []
        self.wrong: list[str] = []

    def run(self, clients: int, count: int) -> float:
        """Send `count` requests by `clients` threads; the time of all."""
        numbers, lock = iter(range(count)), threading.Lock()

        def client() -> None:
            connection = http.client.HTTPConnection(self._address, timeout=60)
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return connection.close()
                self._one(connection, self._requests[number % len(self._requests)])

        threads = [threading.Thread(target=client) for _ in range(clients)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def _one(self, connection: http.client.HTTPConnection, request: Any) -> None:
        path, body, headers, expected = request
        start = time.perf_counter()
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        content = response.read()
        self.waits.append(time.perf_counter() - start)
        answer = json.loads(content)
        if response.status != 200:
            self.wrong.append(f"{response.status}: {answer}")
            return
        if expected:
            answer["probabilities"] = [entry["probability"] for entry in answer["top"]]
        for key, value in expected.items():
            if not equal(answer[key], value):
                self.wrong.append(f"{key} is {answer[key]}, not {value}")


def measure(name: str, size: int, clients: int, count: int, alone: bool = False) -> Row:
    """One server under load; of the network `alone`, with numbers only."""
    with tempfile.TemporaryDirectory() as place:
        arguments, predictor, model = prepared(Path(place), name, size)
        requests = requests_of(predictor, size)
        x = torch.rand(1, 3, size, size)
        with torch.no_grad():
            forward = median(seconds(lambda: model(x))[0] for _ in range(15))
            prediction = median(seconds(lambda: predictor(x))[0] for _ in range(15))
        command = [sys.executable, "-m", "posthoc_uq", *arguments]
        if alone:
            command = [sys.executable, __file__, "--bare", place, name]
            requests = [
                (path, body, headers, {}) for path, body, headers, _ in requests if path == "/predict"
            ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                printed = server.stdout.readline()
                load = Load(json.loads(printed)["url"], requests)
                process = psutil.Process(server.pid)
                load.run(clients, count // 10)
                before = process.memory_info().rss
                load.waits.clear()
                worked = -sum(process.cpu_times()[:2])
                spent = load.run(clients, count)
                worked += sum(process.cpu_times()[:2])
                after = process.memory_info().rss
            finally:
                server.terminate()
    waits = sorted(load.waits)
    p95, p99 = (waits[min(len(waits) - 1, int(share * len(waits)))] for share in (0.95, 0.99))
    return {
        "server": "bare" if alone else "posthoc-uq",
        "requests": count,
        "clients": clients,
        "wrong": len(load.wrong),
        "forward, ms": 1e3 * forward,
        "prediction, ms": 1e3 * prediction,
        "p50, ms": 1e3 * waits[len(waits) // 2],
        "p95, ms": 1e3 * p95,
        "p99, ms": 1e3 * p99,
        "p99 / forward": p99 / forward,
        "p99 / prediction": p99 / prediction,
        "requests per s": count / spent,
        "processor, ms": 1e3 * worked / count,
        "memory before, MiB": before / 2**20,
        "memory after, MiB": after / 2**20,
        "first wrong": (load.wrong or [None])[0],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description="posthoc-uq serve under load.")
    parser.add_argument("--clients", type=int, nargs="+", default=[8])
    parser.add_argument("--model", choices=("resnet", "small"), default="resnet")
    parser.add_argument("--bare", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    parser.add_argument("--smoke", action="store_true", help="a small network and few requests")
    parser.add_argument("--json", type=output_file, help="write the numbers here too")
    options = parser.parse_args(arguments)
    if os.environ.get("OMP_NUM_THREADS") != "1" or torch.get_num_threads() != 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # as many threads on both sides, as the server has
        torch.set_num_threads(1)
    if options.bare:
        return bare(*options.bare)
    if options.smoke:
        rows = [measure("small", 12, 4, 60)]
    else:
        rows = [
            measure(options.model, options.size, clients, options.requests, alone)
            for clients in options.clients
            for alone in (False, True)
        ]
    print(table([{key: value for key, value in row.items() if key != "first wrong"} for row in rows]))
    for row in rows:
        if row["first wrong"]:
            print(f"WRONG: {row['first wrong']}")
    if options.json:
        write_json(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
