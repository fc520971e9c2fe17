"""Random numbers that depend on a sample alone, and a guard for the global random state.

A label drawn for a sample is keyed on the bytes of that sample's input, so it is the same whatever the batch
size, the order of the samples, the device or the number of processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double

_MASK = (1 << 64) - 1
_KEPT_WORDS = 2**18  # up to which the factors of an input's words are kept
_MAX_WORDS = 2**20  # of 8 bytes, in one temporary of the hashes
# 64-bit numbers are hashed as two words: the low bits of a float64 such as 1.0 are all zero, and would stay zero in a
# product modulo 2^64.
_BYTES_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


# Multipliers and shifts of the SplitMix64 finaliser (Steele, Lea, Flood 2014).
_GAMMA, _MIX1, _MIX2 = (_signed(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # torch's >> keeps the sign of int64; the mask makes it the shift of an unsigned word.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """The SplitMix64 finaliser on int64 words, element by element."""
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    return x ^ _shift_right(x, 31)


def mixed_seed(*words: int) -> int:
    """One non-negative 63-bit seed from several integers, by the same finaliser."""
    return mixed_seeds(words[:1], *words[1:])[0] if words else 0


def mixed_seeds(firsts: Sequence[int], *others: int) -> list[int]:
    """`mixed_seed` of each of `firsts` with the same other words."""
    state = np.zeros(len(firsts), dtype=np.uint64)
    for words in (firsts, *([word] for word in others)):
        added = np.array([(word + _GAMMA) & _MASK for word in words], dtype=np.uint64)
        state = state * np.uint64(_GAMMA & _MASK) + added
        for shift, factor in ((30, _MIX1), (27, _MIX2), (31, 1)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor & _MASK)
    return (state & np.uint64(_MASK >> 1)).tolist()


def sample_keys(tensors: Iterable[Tensor], samples: int, seed: int) -> Tensor:
    """A 64-bit hash ``(samples,)`` of each sample's input, from every tensor whose first dimension counts the
    samples.

    Integer arithmetic modulo 2^64 is exact in any order, so the key does not depend on device or batch.
    """
    keys: Tensor | None = None
    for tensor in tensors:
        if tensor.ndim == 0 or tensor.shape[0] != samples:
            continue
        rows = tensor.detach().reshape(samples, -1).contiguous()
        if rows.dtype == torch.bool:
            rows = rows.to(torch.uint8)
        if rows.is_complex():
            rows = torch.view_as_real(rows).reshape(samples, -1)
        if rows.stride(-1) != 1:  # of one column, as numpy's array[:, None] has it
            rows = rows.clone(memory_format=torch.contiguous_format)
        words = rows.view(_BYTES_AS_INTEGER[rows.element_size()])
        make = _odd_words if words.shape[1] <= _KEPT_WORDS else _odd_words.__wrapped__
        weights = make(words.shape[1], words.device)
        step = max(1, _MAX_WORDS // max(1, words.shape[1]))
        sums = [(few.to(torch.int64) * weights).sum(dim=1) for few in words.split(step)]
        part = mix(torch.cat(sums))
        keys = part if keys is None else mix(keys * _GAMMA + part)
    if keys is None:
        keys = torch.arange(samples, device="cpu")
    return mix(keys + mixed_seed(seed))


@lru_cache(maxsize=8)
def _odd_words(count: int, device: torch.device) -> Tensor:
    """By which the words of an input are multiplied."""
    return mix(torch.arange(1, count + 1, device=device) * _GAMMA) | 1


def number_keys(keys: Tensor, numbers: Tensor) -> Tensor:
    """Keys ``(samples,)`` of copies told apart by the number of each; a first one, of number 0, keeps its own."""
    return torch.where(numbers > 0, mix(keys + numbers * _GAMMA), keys)


def uniforms(keys: Tensor, count: int) -> Tensor:
    """``(samples, count)`` float64 numbers in (0, 1), a function of the keys alone."""
    streams = torch.arange(1, count + 1, device=keys.device) * _GAMMA
    bits = _shift_right(mix(keys.unsqueeze(1) + streams), 11)  # 53 random bits
    return (as_double(bits) + 0.5) / (1 << 53)


def share_of(keys: Tensor, share: float) -> Tensor:
    """Which samples ``(samples,)`` belong to a share of the data: a function of the keys alone, by other bits than
    those of `uniforms`.
    """
    bits = _shift_right(mix(mix(keys ^ _MIX1) + _GAMMA), 11)
    return bits < int(share * (1 << 53))


def device_generators() -> list[tuple[Any, tuple[int, ...]]]:
    """The global generators of the devices in use: torch's module for the device, and the arguments for one."""
    generators: list[tuple[Any, tuple[int, ...]]] = []
    for module in (torch.cuda, torch.xpu):
        if module.is_available() and module.is_initialized():
            generators += [(module, (index,)) for index in range(module.device_count())]
    if torch.backends.mps.is_available():
        generators.append((torch.mps, ()))
    return generators


def present_state() -> Callable[[], None]:
    """What gives the global generators back the states that they have now."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices, state = device_generators(), torch.get_rng_state()
    device_states = [module.get_rng_state(*place) for module, place in devices]

    def restore() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(state)
        for (module, place), saved in zip(devices, device_states, strict=True):
            module.set_rng_state(saved, *place)

    return restore


@contextmanager
def isolated_random_state(seed: int | None = None) -> Generator[None]:
    """Run a block with the global generators (Python, NumPy, torch) seeded, and restore their states afterwards."""
    restore, devices = present_state(), device_generators()
    try:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            # Not torch.manual_seed, which also seeds devices that are not in use yet and would not be restored.
            torch.default_generator.manual_seed(seed)
            for module in {module for module, _ in devices}:
                getattr(module, "manual_seed_all", module.manual_seed)(seed)
        yield
    finally:
        restore()
