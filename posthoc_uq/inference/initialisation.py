"""A new initialisation of a trained model, by its modules' own ``reset_parameters``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from posthoc_uq.randomness import isolated_random_state, mixed_seed
from posthoc_uq.replica import model_device, replicate
from posthoc_uq.warned import warn_user

_INITIALISATION = 201  # stream of random numbers from the seed


def initialised(model: nn.Module, trained: Mapping[str, Tensor], seed: int, option: str) -> dict[str, Tensor]:
    """Parameters and buffers of a new initialisation; batch normalisations lose the data's statistics.

    Args:
        model: whose modules say how they begin.
        trained: its parameters, which modules without ``reset_parameters`` keep, with a warning.
        seed: of the random numbers, which do not depend on the device.
        option: which was given for this, for the warning.
    """
    device = model_device(model)
    not_reset: list[str] = []
    with isolated_random_state(mixed_seed(seed, _INITIALISATION)):
        twin = replicate(model, {name: p.clone() for name, p in trained.items()})
        twin = twin.to("cpu")  # its random numbers do not depend on the device
        for prefix, module in twin.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.clone())
            reset: Any = getattr(module, "reset_parameters", None) or getattr(
                module, "_reset_parameters", None
            )
            if callable(reset):
                reset()
            else:
                not_reset += [
                    f"{prefix}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)
                ]
    if not_reset:
        warn_user(
            f"{option} keeps {len(not_reset)} trained parameters whose modules have no reset_parameters(), "
            f"{not_reset[0]!r} among them."
        )
    tensors = {name: p.detach().to(device) for name, p in twin.named_parameters()}
    return tensors | {name: buffer.detach().to(device) for name, buffer in twin.named_buffers()}
