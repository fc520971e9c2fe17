"""Files and checkpoints of every method that somebody changed and gave a digest that fits.

Each file must be refused with an error of the project, or give finite results; a fit that goes on from such a
checkpoint likewise. Run as a script for many of them: ``python tests/hostile_files.py --count 3000``.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import torch
from networks import short_options
from storage_helpers import CALIBRATION, LEFT_OUT, PROMISES, kind_of, sealed
from torch import Tensor, nn

import posthoc_uq as uq
from posthoc_uq import PosthocUQError, methods
from posthoc_uq.likelihoods import ConformalScores
from posthoc_uq.methods import checkpoint, read_snapshot, write_snapshot
from posthoc_uq.posteriors import LeaveOneOut, ScaleCorrection

METHODS: dict[str, dict[str, Any]] = {
    name: {"likelihood": "classification"} | short_options(name) for name in methods.METHODS
}
METHODS["diag"]["likelihood"], METHODS["efb"]["likelihood"] = "binary", "regression"
METHODS["full"] |= {
    "prior_precision": {"0.weight": 2.0, "0.bias": 1.0, "3.weight": 0.5, "3.bias": 1.0},
    "prior_mean": {"3.bias": 0.5},
}
VALUES: list[Any] = [None, True, 0, -1, 1, 7, 2**31, 2**63, 2**70, 10**400]
VALUES += [1e-300, 1e-3, 0.5, 1.9, 1e-29, 1e29, 1e31, 3e38, 1e300]
VALUES += [float("nan"), float("inf"), -float("inf"), "", "evil", "\x1b]0;pwned\x07", "x" * 5000, "\udc80"]
VALUES += [[], [[]], [1.0], [1, "a", None], {}, {"x": 1}, {"": {}}, [[[[[[[[[1]]]]]]]]]]


def model(likelihood: str = "classification") -> nn.Module:
    """A small network with a grouped convolution."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        last = nn.Linear(16, 1 if likelihood == "binary" else 3)
        return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), last).eval()


def batches(likelihood: str = "classification") -> list[tuple[Tensor, Tensor]]:
    """Five batches of images."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 2, 4, 4, generator=generator)
    y = torch.randint(0, 3, (20,), generator=generator)
    targets = {
        "classification": y,
        "binary": y % 2,
        "regression": nn.functional.one_hot(y, 3) + 0.1 * x[:, 0, 0, :3],
    }
    return list(zip(x.split(4), targets[likelihood].split(4), strict=True))


def fit(method: str, loader: Any = None, **options: Any) -> uq.Posterior:
    """A fit with the options of `METHODS`."""
    own = {"prior_precision": 1.0, "progress": False, **METHODS[method]}
    likelihood = own["likelihood"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return uq.fit(model(likelihood), loader or batches(likelihood), method=method, **own, **options)


class Image:
    """What a file holds, to be changed and written again."""

    def __init__(self, path: Path) -> None:
        self.kind = kind_of(path.read_bytes())
        self.arrays: dict[str, np.ndarray] = {}
        self.attributes: dict[str, dict[str, Any]] = {}
        with h5py.File(path) as file:
            self.state = json.loads(file["state"][()])
            self.attributes["/"] = dict(file.attrs)

            def note(name: str, item: Any) -> None:
                self.attributes[name] = dict(item.attrs)
                if isinstance(item, h5py.Dataset) and name != "state":
                    self.arrays[name] = item[()]

            file.visititems(note)

    def write(self, path: Path, text: str | None = None) -> None:
        """The file with a digest that fits."""
        buffer = BytesIO()
        with h5py.File(buffer, "w", userblock_size=512) as file:
            text = json.dumps(self.state) if text is None else text
            file.create_dataset("state", data=np.bytes_(text.encode(errors="replace")))
            for name in self.attributes:
                if name not in ("/", "state") and name not in self.arrays:
                    file.require_group(name)
            for name, array in self.arrays.items():
                file.create_dataset(name, data=array)
            for name, values in self.attributes.items():
                if name in file:
                    file[name].attrs.update(values)
        path.write_bytes(sealed(buffer.getvalue(), self.kind))


def place(value: Any, source: random.Random) -> tuple[Any, Any]:
    """A container somewhere in a description, and a key of it: often of a single value, of any of them alike."""
    leaves = [] if source.random() < 0.5 else [*leaves_of(value)]
    if leaves:
        return source.choice(leaves)
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = source.choice(keys)
        inner = value[key]
        if not isinstance(inner, (dict, list)) or not inner or source.random() < 0.15:
            return value, key
        value = inner


def leaves_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every single value of a description, by its container and key; few of long lists. However deep it is."""
    left = [value]
    while left:
        holder = left.pop()
        for key in list(holder) if isinstance(holder, dict) else range(min(3, len(holder))):
            if isinstance(holder[key], (dict, list)):
                left.append(holder[key])
            else:
                yield holder, key


def change_description(image: Image, source: random.Random) -> str | None:
    """One change of the description; a text where JSON cannot be made of a value."""
    holder, key = place(image.state, source)
    what = source.choice(["replace", "replace", "replace", "scale", "delete", "add", "move", "double"])
    if what == "replace":
        holder[key] = source.choice(VALUES)
    elif what == "scale":
        number = isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool)
        holder[key] = holder[key] * source.choice([-1, 0, 2, 1e10, 1e-200, 1 + 1e-9]) if number else 0
    elif what == "delete":
        del holder[key]
    elif what == "add":
        if isinstance(holder, dict):
            holder[source.choice(["evil", "", "name", "kind", "\x1b[2J"])] = source.choice(VALUES)
        else:
            holder.append(source.choice(VALUES))
    elif what == "move":
        other, place_of = place(image.state, source)
        holder[key] = json.loads(json.dumps(other[place_of]))
    elif isinstance(holder, dict):
        text = json.dumps(image.state)
        name = json.dumps(key)
        return text.replace(f"{name}: ", f"{name}: {json.dumps(source.choice(VALUES[:20]))}, {name}: ", 1)
    return None


def change_numbers(image: Image, source: random.Random) -> None:
    """One change of a dataset."""
    name = source.choice(list(image.arrays))
    array = np.array(image.arrays[name])
    numbers = np.random.default_rng(source.getrandbits(32))
    what = source.choice(["one", "all", "scale", "random", "shape", "type", "drop", "copy", "swap"])
    value = source.choice([float("nan"), float("inf"), -1.0, 0.0, 3e38, 1e-40, 1e20, 1e29, -1e-9])
    with np.errstate(all="ignore"):  # packed bits hold no such numbers
        stored = np.asarray(value).astype(array.dtype)
    if what == "one" and array.size:
        array.flat[source.randrange(array.size)] = stored
    elif what == "all":
        array[...] = stored
    elif what == "scale":
        array = array * np.float32(source.choice([1e10, -1, 1e-10, 2, 1.001]))
    elif what == "random":
        array = numbers.standard_normal(array.shape).astype(array.dtype)
    elif what == "shape":
        array = source.choice(
            [array.reshape(-1), array[..., :-1] if array.ndim else array, array[None], array.T]
        )
    elif what == "type":
        array = array.astype(source.choice(["<f8", "<f2", "<i4", ">f4"]))
    elif what == "drop":
        del image.arrays[name]
        return
    elif what == "copy":
        name = source.choice([name + "2", "blocks/evil/x", "evil"])
    elif what == "swap":
        array = image.arrays[source.choice(list(image.arrays))]
    image.arrays[name] = array


def change_attributes(image: Image, source: random.Random) -> None:
    """One more attribute, or an empty group."""
    if source.random() < 0.7:
        image.attributes[source.choice(list(image.attributes))][
            source.choice(["evil", "dtype", "\x1b[2J"])
        ] = 1
    else:
        image.attributes[source.choice(["evil", "blocks/evil", "layers/evil/evil"])] = {}


def changed(original: Path, target: Path, source: random.Random) -> None:
    """A file that is one to three changes away from another."""
    while True:
        image, text = Image(original), None
        with np.errstate(all="ignore"):
            for _ in range(source.choice([1, 1, 2, 3])):
                pick = source.random()
                if pick < 0.6 or not image.arrays:
                    text = change_description(image, source)
                elif pick < 0.93:
                    change_numbers(image, source)
                else:
                    change_attributes(image, source)
        try:
            image.write(target, text)
            return
        except (ValueError, OSError, TypeError, OverflowError, RuntimeError, AttributeError, KeyError):
            continue  # no such file can be written


def check_finite(posterior: uq.Posterior, x: Tensor) -> None:
    """Everything that a posterior holds and gives is finite, or an error of the project."""
    for block in posterior.blocks.values():
        assert all(bool(torch.isfinite(tensor).all()) for tensor in block.tensors().values())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in posterior.mean.values())
    numbers = [posterior.scale, posterior.residual_weight, posterior.noise_scale, posterior.temperature]
    prior = posterior.prior_precision
    numbers += list(prior.values()) if isinstance(prior, dict) else [prior]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    str(posterior.report())
    for variance in posterior.variance().values():
        assert bool((torch.isfinite(variance) & (variance >= 0)).all())
    for draw in posterior.sample(2, torch.Generator().manual_seed(0)).values():
        assert bool(torch.isfinite(draw).all())
    assert posterior.model is not None
    uq.wrap(posterior.model, posterior)(x)


def run(count: int, seed: int, folder: Path) -> Counter[tuple[str, str]]:
    """How many files of each kind were refused, and how many read; raises at the first that does neither."""
    source, found = random.Random(seed), Counter[tuple[str, str]]()
    for method in METHODS:
        posterior = fit(method)
        calibration = ScaleCorrection(**CALIBRATION) if method == "inf" else None
        promises = ConformalScores(**PROMISES) if method in ("inf", "kfac") else None
        history = replace(posterior.history, calibration=calibration, promises=promises)
        if method in ("inf", "efb"):
            history = replace(history, leave_one_out=LeaveOneOut(**LEFT_OUT[METHODS[method]["likelihood"]]))
        posterior = posterior.replaced(history=history)
        uq.save(posterior, folder / f"{method}.h5")
    for number, name in zip(range(count), cycle(METHODS), strict=False):
        target, likelihood = folder / "hostile.h5", METHODS[name]["likelihood"]
        changed(folder / f"{name}.h5", target, source)
        kept, untrusted = target.read_bytes(), source.random() < 0.02
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                uq.inspect(target) if untrusted else None
                posterior = uq.load(target, model(likelihood), untrusted=untrusted)
                check_finite(posterior, batches(likelihood)[0][0])
            found[name, "read"] += 1
        except PosthocUQError:
            found[name, "refused"] += 1
        except BaseException:
            (folder.parent / f"failed-{seed}-{number}.h5").write_bytes(kept)
            print(f"file {number} of seed {seed}: {name}", flush=True)
            raise
    return found


def unfinished(method: str, path: Path) -> tuple[Any, uq.Posterior]:
    """The state in the checkpoint of a fit that is half done, and what the whole fit gives."""
    states = list[Any]()

    def write(target: Path, state: Any) -> bytes:
        digest = write_snapshot(target, state)
        if state["running"] is not None:
            states.append(read_snapshot(target))
        return digest

    with mock.patch.object(checkpoint, "write_snapshot", write):
        posterior = fit(method, checkpoint=path, checkpoint_every=1)
    return states[len(states) // 2], posterior


def run_checkpoints(
    count: int, seed: int, folder: Path, names: Sequence[str] = tuple(METHODS)
) -> Counter[tuple[str, str]]:
    """How many changed checkpoints of each method a fit refused, and from how many it went on: to the posterior of the
    whole fit, or to another one; raises at the first error that is not the project's.
    """
    source, found = random.Random(seed), Counter[tuple[str, str]]()
    path, states, wholes = folder / "fit.checkpoint", dict[str, Any](), dict[str, uq.Posterior]()
    for method in names:
        states[method], wholes[method] = unfinished(method, path)
    for number, name in zip(range(count), cycle(names), strict=False):
        state = change_state(copy.deepcopy(states[name]), source)
        try:
            write_snapshot(path, state)
        except PosthocUQError:
            raise
        except Exception:
            continue  # no such file can be written
        try:
            posterior = fit(name, checkpoint=path)
            check_finite(posterior, batches(METHODS[name]["likelihood"])[0][0])
            found[name, "read" if same(posterior, wholes[name]) else "other"] += 1
        except PosthocUQError:
            found[name, "refused"] += 1
        except BaseException:
            write_snapshot(folder.parent / f"failed-{seed}-{number}.checkpoint", state)
            print(f"checkpoint {number} of seed {seed}: {name}", flush=True)
            raise
        path.unlink(missing_ok=True)
    return found


def same(one: uq.Posterior, other: uq.Posterior) -> bool:
    """Whether two posteriors have the same bits."""
    tensors = [
        p.mean | {f"{b}/{n}": t for b, v in p.blocks.items() for n, t in v.tensors().items()}
        for p in (one, other)
    ]
    return tensors[0].keys() == tensors[1].keys() and all(
        torch.equal(t, tensors[1][n]) for n, t in tensors[0].items()
    )


def change_state(state: Any, source: random.Random) -> Any:
    """A checkpoint's state, one to three changes away."""
    state = _lists(state)
    for _ in range(source.choice([1, 1, 2, 3])):
        holder, key = place(state, source)
        value = holder[key]
        if isinstance(value, Tensor) and value.numel() and source.random() < 0.8:
            holder[key] = _changed_tensor(value, source)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and source.random() < 0.5:
            with suppress(OverflowError):  # of a value that was changed before
                holder[key] = value * source.choice([-1, 0, 2, 10**18, 1e-200, 1 + 1e-9])
        elif source.random() < 0.2:
            del holder[key]
        else:
            holder[key] = source.choice(VALUES)
    return state


def _changed_tensor(tensor: Tensor, source: random.Random) -> Tensor:
    tensor = tensor.clone()
    what = source.choice(["one", "negative", "scale", "random", "shape", "type"])
    if what == "one":
        tensor.view(-1)[source.randrange(tensor.numel())] = (
            source.choice([0, 1, -1])
            if not tensor.is_floating_point()
            else source.choice([math.nan, math.inf, -1.0, 3e38, 0.0])
        )
    elif what == "negative":
        return -tensor
    elif what == "scale":
        return (tensor * source.choice([0, 2, 1e10, 1e-10])).to(tensor.dtype)
    elif what == "random":
        seeded = torch.Generator().manual_seed(source.getrandbits(32))
        return torch.randn(tensor.shape, generator=seeded).to(tensor.dtype)
    elif what == "shape":
        return tensor[None]
    else:
        return tensor.to(torch.float16)
    return tensor


def _lists(value: Any) -> Any:
    """Nested values whose tuples can be changed."""
    if isinstance(value, dict):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def main() -> None:
    """Count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", action="store_true", help="of fits, in place of posterior files")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        kind = run_checkpoints if given.checkpoints else run
        found = kind(given.count, given.seed, Path(folder))
    for name in sorted({name for name, _ in found}):
        counts = "  ".join(f"{what} {found[name, what]:5}" for what in ("refused", "read", "other"))
        print(f"{name:32} {counts}")
    print(f"{sum(found.values())} files in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
