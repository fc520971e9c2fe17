"""Whether a model and the global random state are, to the bit, what they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def random_state() -> tuple[Any, Any, Tensor]:
    """Python's, NumPy's and torch's."""
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state()


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a user could see of a model: classes, flags, hooks, parameters, buffers, gradients."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name}: dict"] = list(module.__dict__)
        found[f"{name}: class"] = type(module)
        found[f"{name}: training"] = module.training
        found[f"{name}: inplace"] = getattr(module, "inplace", None)
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found[f"{name}: {kind}"] = list(getattr(module, kind).items())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta:  # which has no numbers
            found[f"{name}: tensor"] = id(tensor)
            continue
        hooks = getattr(tensor, "_backward_hooks", None)
        found[f"{name}: tensor"] = (
            id(tensor),
            tensor.data_ptr(),
            tensor.requires_grad,
            list(vars(tensor)),
            hooks,
        )
        found[f"{name}: bytes"] = tensor.detach().numpy().tobytes()
        found[f"{name}: gradient"] = None if tensor.grad is None else tensor.grad.numpy().tobytes()
    return found


class Watch:
    """Compares the model and the random states at the end of a block with those at its start."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        random.seed(11), np.random.seed(12), torch.manual_seed(13)
        self.before, self.states = snapshot(self.model), random_state()

    def __exit__(self, *exception: Any) -> None:
        after, states = snapshot(self.model), random_state()
        assert after.keys() == self.before.keys()
        for name, value in self.before.items():
            assert after[name] == value, name
        assert states[0] == self.states[0] and states[1] == self.states[1]
        assert torch.equal(states[2], self.states[2])
