"""Attacks on ``posthoc-uq serve``: pictures that grow, foreign hosts and origins, connections that dawdle.

    python benchmarks/serve_attack.py
    python benchmarks/serve_attack.py --only pictures names

The script fits a tiny model in a temporary folder and serves it on the loopback address. Every attack is bounded in
count and time, and a server that grows by more than 4 GiB is ended. A bad outcome is

* for pictures: a server that dies, answers 500 or not within two minutes, or grows by more than 768 MiB; for folders,
  a ``predict`` that takes so much more than for a small picture;
* for hosts and origins: a request that is answered and should not be, or the other way round;
* for dawdling connections: a request of another client that is not answered (200) within ten seconds.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from PIL import Image

import posthoc_uq as uq

MODEL = """
from torch import nn


def net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
"""
MAX_GROWTH, KILLED_AT = 768 * 2**20, 4 * 2**30  # bytes by which a server may grow, and at which it is ended
BODY = json.dumps({"input": torch.zeros(3, 8, 8).tolist()}).encode()
JSON, PNG, JPEG = ({"Content-Type": f"{kind}"} for kind in ("application/json", "image/png", "image/jpeg"))


@dataclass
class Found:
    """What an attack did: how often it was tried, how often it succeeded, and a few words."""

    attack: str
    tries: int
    bad: int
    note: str = ""


@dataclass
class Server:
    """A server under attack."""

    process: subprocess.Popen[str]
    port: int
    peak: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def resident(self) -> int:
        """Bytes of memory now; none where it is dead."""
        try:
            return psutil.Process(self.process.pid).memory_info().rss
        except psutil.Error:
            return 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes the peak of its memory, and ends it where that grows beyond all bounds."""
        start = self.peak = self.resident
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.003):
                self.peak = max(self.peak, self.resident)
                if self.peak - start > KILLED_AT:
                    self.process.kill()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def ask(
        self,
        path: str = "/predict",
        body: bytes = BODY,
        headers: dict[str, str] = JSON,
        seconds: float = 10.0,
    ) -> int:
        """The status of an answer on a connection of its own; 0 where there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request("POST", path, body, headers)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def raw(self, content: bytes) -> int:
        """The status of an answer to bytes that are sent as they are."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(content)
            with suppress(OSError):
                first = connection.recv(65536).split(b" ", 2)
                return int(first[1]) if len(first) > 1 else 0
        return 0


class Place:
    """A folder with a fitted model, from which servers are started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "served.py").write_text(MODEL)
        names: dict[str, Any] = {}
        exec(MODEL, names)
        torch.manual_seed(0)
        model = names["net"]()
        posterior = uq.fit(
            model, [(torch.rand(30, 3, 8, 8), torch.arange(30) % 3)], layers="last", progress=False
        )
        uq.save(posterior, folder / "m.h5")
        torch.save(model.state_dict(), folder / "w.pt")

    def command(self, name: str, *options: Any) -> list[str]:
        """A command with the model."""
        model = ["--model", str(self.folder / "served.py") + ":net", "--weights", str(self.folder / "w.pt")]
        return [
            sys.executable,
            "-m",
            "posthoc_uq",
            name,
            str(self.folder / "m.h5"),
            *map(str, options),
            *model,
        ]

    @contextmanager
    def serving(self, *options: Any) -> Iterator[Server]:
        """A server, until the end of the block."""
        command = self.command("serve", "--port", 0, "--json", *options)
        with (
            (self.folder / "stderr.txt").open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            try:
                assert process.stdout is not None
                printed = process.stdout.readline()
                if process.poll() is not None or not printed:
                    raise SystemExit((self.folder / "stderr.txt").read_text())
                yield Server(process, urlsplit(json.loads(printed)["url"]).port or 0)
            finally:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


def picture(width: int, height: int, kind: str = "png", mode: str = "RGB", **options: Any) -> bytes:
    """A picture of one colour as a file."""
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def with_chunks(file: bytes, *chunks: bytes) -> bytes:
    """A PNG file with more chunks after its header."""
    return file[:33] + b"".join(chunks) + file[33:]


def deep_png(side: int) -> bytes:
    """A PNG file of 16 bits a channel, RGB and alpha."""
    head = struct.pack(">IIBBBBB", side, side, 16, 6, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\0" * (8 * side)) * side, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def many_scans(side: int, count: int) -> bytes:
    """A progressive JPEG file whose last scan is there `count` times."""
    file = picture(side, side, "jpeg", progressive=True)
    last, end = file.rindex(b"\xff\xda"), file.rindex(b"\xff\xd9")
    return file[:end] + file[last:end] * count + file[end:]


def long_profile(segments: int) -> bytes:
    """A JPEG file with a colour profile of `segments` times 64 kB."""
    file = picture(64, 64, "jpeg")
    parts = [
        b"\xff\xe2" + struct.pack(">H", 65535) + b"ICC_PROFILE\0" + bytes((n + 1, segments)) + b"\0" * 65519
        for n in range(segments)
    ]
    return file[:2] + b"".join(parts) + file[2:]


def form(files: Sequence[bytes]) -> tuple[bytes, dict[str, str]]:
    """Files as the body of a form, and its headers."""
    parts = [
        b'--b\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\n' + file + b"\r\n"
        for file in files
    ]
    return b"".join(parts) + b"--b--\r\n", {"Content-Type": "multipart/form-data; boundary=b"}


def pictures_list(smoke: bool) -> dict[str, tuple[str, bytes, dict[str, str]]]:
    """Bodies that are small and want to be large."""
    side = 2000 if smoke else 6300  # 39.7 million pixels, just below the limit

    def png(content: bytes) -> tuple[str, bytes, dict[str, str]]:
        return "/predict/image", content, PNG

    def jpeg(content: bytes) -> tuple[str, bytes, dict[str, str]]:
        return "/predict/image", content, JPEG

    large = picture(side, side)
    inflated = b"a\0\0" + zlib.compress(b" " * 2**28, 9)
    frame = struct.pack(">IIIIIHHBB", 0, side, side, 0, 0, 1, 10, 0, 0)
    grey = picture(side, side, mode="L")
    animated = [chunk(b"acTL", struct.pack(">II", 5000, 0)), chunk(b"fcTL", frame)]
    several = ("/predict/batch", *form([large] * 8))
    bombs = {
        "1 x 10,000 pixels": png(picture(1, 10_000, mode="1")),
        "10,000 x 1 pixels": png(picture(10_000, 1, mode="1")),
        "1 x 100,000 pixels": png(picture(1, 100_000, mode="1")),
        f"eight pictures of {side}^2 in a form": several,
        f"a palette, {side}^2": png(picture(side, side, mode="P")),
        f"16 bits a channel with alpha, {side}^2": png(deep_png(side)),
        f"5,000 frames, {side}^2": png(with_chunks(grey, *animated)),
        "zTXt of 256 MiB": png(with_chunks(picture(64, 64), chunk(b"zTXt", inflated))),
        "200 texts of 1 MiB": png(
            with_chunks(
                picture(64, 64), *[chunk(b"zTXt", b"a\0\0" + zlib.compress(b" " * (2**20 - 1), 9))] * 200
            )
        ),
        "iCCP of 256 MiB": png(with_chunks(picture(64, 64), chunk(b"iCCP", inflated))),
        "eXIf of 15 MiB": png(with_chunks(picture(64, 64), chunk(b"eXIf", b"\0" * 15 * 2**20))),
        "300,000 empty chunks": png(with_chunks(picture(64, 64), chunk(b"teXt", b"") * 300_000)),
        "a profile of 15 MiB": jpeg(long_profile(240)),
        f"a progressive JPEG, {side}^2": jpeg(picture(side, side, "jpeg", progressive=True)),
        f"20,000 scans, {side}^2": jpeg(many_scans(side, 20_000)),
    }
    if not smoke:
        bombs[f"64 pictures of {side}^2 in a form"] = ("/predict/batch", *form([large] * 64))
    return bombs


def pictures(place: Place, smoke: bool) -> Iterator[Found]:
    """Small files that are large pictures, or take long."""
    bombs = pictures_list(smoke)
    while bombs:
        with place.serving("--image-size", 224) as server:
            while bombs:
                name = next(iter(bombs))
                path, body, headers = bombs.pop(name)
                before = server.resident
                start = time.perf_counter()
                with server.watched():
                    status = server.ask(path, body, headers, 120)
                grown = server.peak - before
                bad = grown > MAX_GROWTH or status in (0, 500)
                spent = time.perf_counter() - start
                note = f"{len(body):,} bytes: status {status}, {grown / 2**20:,.0f} MiB, {spent:.1f} s"
                yield Found(f"picture: {name}", 1, int(bad), note)
                if bad:
                    break  # with a fresh server
    small = _predicted(place, "small", picture(64, 64))
    taken = _predicted(place, "strip", picture(1, 10_000, mode="1")) - small
    note = f"{taken / 2**20:,.0f} MiB more than for a small one"
    yield Found("folder: 1 x 10,000 pixels", 1, int(taken > MAX_GROWTH), note)


def _predicted(place: Place, name: str, content: bytes) -> int:
    """The memory that `predict` takes at most for a folder with one picture, in bytes."""
    folder = place.folder / name
    folder.mkdir()
    (folder / "a.png").write_bytes(content)
    options = ["--image-size", 224, "--workers", 0, "--device", "cpu", "-o", folder / "out.csv", "-q"]
    process = subprocess.Popen(
        place.command("predict", folder, *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0  # it was waited for here
    return usage.ru_maxrss * 1024


HOSTS = {
    "localhost": True,
    "LOCALHOST:80": True,
    "127.0.0.1:8000": True,
    "[::1]:8000": True,
    "evil.com": False,
    "evil.com:80@localhost": False,
    "localhost:80@evil.com": False,
    "user@localhost": False,
    "user:password@localhost:8000": False,
    "@localhost": False,
    "[::1]evil": False,
    "[::1]evil.com:80": False,
    "evil[::1]": False,
    "[::1": False,
    "::1": False,
    "localhost:": False,
    "localhost:port": False,
    "localhost:80:80": False,
    "localhost:-1": False,
    "localhost:99999999": False,
    "localhost/evil.com": False,
    "localhost?evil.com": False,
    "localhost#evil.com": False,
    "localhost\\evil.com": False,
    "localhost, evil.com": False,
    "localhost evil.com": False,
    "localhost\tevil.com": False,
    "//localhost": False,
    "http://localhost": False,
    "localhost;": False,
    "": False,
}
ORIGINS = {
    (): True,
    ("Origin: http://localhost:3000",): True,
    ("Origin: http://localhost", "Sec-Fetch-Site: same-origin"): True,
    ("Sec-Fetch-Site: none",): True,
    ("Origin: http://evil.com",): False,
    ("Origin: https://evil.com:8000",): False,
    ("Origin: null",): False,
    ("Origin: ",): False,
    ("Origin: localhost",): False,
    ("Origin: http://localhost.evil.com",): False,
    ("Origin: http://evil.com#localhost",): False,
    ("Origin: http://localhost@evil.com",): False,
    ("Origin: http://evil.com:80@localhost",): False,
    ("Origin: file://",): False,
    ("Origin: http://localhost", "Origin: http://evil.com"): False,
    ("Origin: http://localhost, http://evil.com",): False,
    ("Origin: http://evil.com", "Sec-Fetch-Site: same-origin"): False,
    ("Origin: http://localhost", "Sec-Fetch-Site: cross-site"): False,
    ("Sec-Fetch-Site: cross-site",): False,
    ("Sec-Fetch-Site: Cross-Site",): False,
    ("Sec-Fetch-Site: none", "Sec-Fetch-Site: cross-site"): False,
    ("Sec-Fetch-Site: none, cross-site",): False,
    ("Sec-Fetch-Site: ",): False,
}


def names(place: Place, smoke: bool) -> Iterator[Found]:
    """Requests under other names, and from pages of other sites."""

    def wrong(server: Server, cases: Sequence[tuple[list[str], bool]]) -> list[str]:
        found: list[str] = []
        for lines, good in cases:
            head = ["POST /predict HTTP/1.1", *lines, "Content-Type: application/json"]
            head += [f"Content-Length: {len(BODY)}", "Connection: close", "", ""]
            status = server.raw("\r\n".join(head).encode("latin-1") + BODY)
            if (status == 200) != good:
                found.append(f"{' | '.join(lines)} gets {status}")
        return found

    with place.serving() as server:
        hosts = [([f"Host: {host}"], good) for host, good in HOSTS.items()]
        hosts += [(["Host: localhost", "Host: evil.com"], False), ([], False)]
        found = wrong(server, hosts)
        yield Found("hosts", len(hosts), len(found), "; ".join(found[:3]))
        origins = [(["Host: localhost", *lines], good) for lines, good in ORIGINS.items()]
        found = wrong(server, origins)
        yield Found("origins", len(origins), len(found), "; ".join(found[:3]))


class Siege:
    """Connections that send a few bytes and then dawdle; one that the server ends, or answers where it is not to be
    left `unread`, is opened again, up to a bound.
    """

    def __init__(
        self, server: Server, count: int, sent: bytes, unread: bool = False, most: int = 20_000
    ) -> None:
        self._server, self._sent, self._left = server, sent, most
        self._event = getattr(select, "POLLRDHUP", select.POLLHUP) if unread else select.POLLIN
        self._open: dict[int, socket.socket] = {}
        self._stop = threading.Event()
        self.opened = 0
        for _ in range(count):
            self._one()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def _one(self) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        with suppress(OSError):
            made = socket.create_connection(("127.0.0.1", self._server.port), timeout=5)
            self._open[made.fileno()] = made
            self.opened += 1
            if self._sent:
                made.settimeout(0.2)  # a server that does not read must not hold the script
                made.sendall(self._sent)

    def _keep(self) -> None:
        poll = select.poll()
        while not self._stop.wait(0.02):
            for number in list(self._open):
                poll.register(number, self._event)
            for number, _ in poll.poll(0):
                poll.unregister(number)
                ended = self._open.pop(number)
                ended.close()
                self._one()

    def __enter__(self) -> Siege:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for made in self._open.values():
            made.close()
        self._open.clear()


def dawdling(place: Place, smoke: bool) -> Iterator[Found]:
    """Connections that hold places, while another client wants answers."""
    asked = 10 if smoke else 60
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    started = head + b"Content-Length: 1000\r\n\r\n{"
    nearly = head + b"Content-Length: 1048576\r\n\r\n" + b" " * (2**20 - 1)
    unread = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 30
    sieges = {
        "64 slow bodies": (64, started),
        "520 slow bodies": (520, started),
        "100 bodies that lack a byte of 1 MiB": (100, nearly),
        "520 idle connections": (520, b""),
        "50 slow headers": (50, b"POST /pre"),
        "520 slow headers": (520, b"POST /pre"),
        "50 clients that never read": (50, unread),
        "520 clients that never read": (520, unread),
    }
    for name, (count, sent) in sieges.items():
        with place.serving("--max-bytes", 2**20) as server:
            for _ in range(30):
                server.ask()
            before = server.resident
            with server.watched(), Siege(server, count, sent, sent == unread) as siege:
                statuses = [_after(0.05, server.ask) for _ in range(asked)]
            bad = sum(status != 200 for status in statuses)
            grown = (server.peak - before) / 2**20
            yield Found(
                f"dawdling: {name}", asked, bad, f"{siege.opened:,} were opened; {grown:,.0f} MiB more"
            )
    with place.serving() as server:
        before = server.resident
        for _ in range(2):
            statuses = [server.ask() for _ in range(100 if smoke else 1500)]
        grown = server.resident - before
        bad = sum(status != 200 for status in statuses) + int(grown > 2**26)
        yield Found("many requests", 2 * len(statuses), bad, f"{grown / 2**20:,.0f} MiB more")
        body = b'--b\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n' + b"a:b\r\n" * 2_000_000
        kind = {"Content-Type": "multipart/form-data; boundary=b"}
        sender = threading.Thread(target=server.ask, args=("/predict/batch", body, kind, 60))
        sender.start()
        longest, bad, tries = 0.0, 0, 0
        while sender.is_alive() and tries < 1000:
            start = time.perf_counter()
            bad += server.ask() != 200
            longest, tries = max(longest, time.perf_counter() - start), tries + 1
        sender.join()
        yield Found(
            "a form of 2,000,000 headers", tries, bad, f"longest wait of another client {longest:.1f} s"
        )


def _after(seconds: float, ask: Callable[[], int]) -> int:
    time.sleep(seconds)
    return ask()


ATTACKS: dict[str, Callable[[Place, bool], Iterator[Found]]] = {
    "pictures": pictures,
    "names": names,
    "dawdling": dawdling,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a script; the exit code."""
    parser = argparse.ArgumentParser(description="Attacks on posthoc-uq serve.")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), help="these alone")
    parser.add_argument("--smoke", action="store_true", help="fewer and smaller ones")
    options = parser.parse_args(arguments)
    found: list[Found] = []
    print(f"{'attack':64} {'tries':>6} {'bad outcomes':>13}")
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        for name in options.only:
            for one in ATTACKS[name](place, options.smoke):
                print(f"{one.attack:64} {one.tries:6,} {one.bad:13,}  {one.note}", flush=True)
                found.append(one)
    bad = sum(one.bad for one in found)
    print(f"{'in all':64} {sum(one.tries for one in found):6,} {bad:13,}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
