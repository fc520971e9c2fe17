"""Trained weights from a file into a model."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.model import bare_name
from posthoc_uq.core.paths import check_regular

_WRAPPERS = ("state_dict", "model_state_dict", "model", "weights")
_PREFIX = "model."  # of a module that holds the model, as trainers have it
_COUNTER = "num_batches_tracked"  # of BatchNorm; old files lack it and eval mode does not read it
_SHOWN = 3

Value = TypeVar("Value")


def read_state(path: str) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file, or of a state dict that `torch.save` wrote, bare or inside a checkpoint.

    Nothing but tensors and plain values is unpickled (`torch.load` with ``weights_only=True``).

    Raises:
        PosthocUQError: there is no such file, or no state dict in it.
    """
    check_regular(path, "The weights file")
    try:
        with open(path, "rb"):
            pass
    except FileNotFoundError:
        raise PosthocUQError(f"There is no weights file '{path}'.") from None
    except OSError as error:
        raise PosthocUQError(
            f"The weights file '{path}' cannot be read: {error.strerror or error}."
        ) from None
    content = _safetensors(path) if path.endswith(".safetensors") else _pickled(path)
    while isinstance(content, Mapping):
        mapping = cast(Mapping[str, Any], content)
        inner = next((mapping[key] for key in _WRAPPERS if isinstance(mapping.get(key), Mapping)), None)
        if inner is None:
            tensors = {str(name): value for name, value in mapping.items() if isinstance(value, Tensor)}
            if tensors:
                return tensors
            break
        content = inner
    if isinstance(content, nn.Module):
        content = content.state_dict()
    raise PosthocUQError(
        f"'{path}' holds no state dict; write one with torch.save(model.state_dict(), '{path}')."
    )


def _safetensors(path: str) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, ValueError) as error:
        raise PosthocUQError(f"'{path}' is not a readable safetensors file: {error}") from None


def _pickled(path: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error) or "GLOBAL" in str(error):
            raise PosthocUQError(
                f"'{path}' holds Python objects beside tensors, which are not loaded; write the state dict alone with "
                f"torch.save(model.state_dict(), ...)."
            ) from None
        raise PosthocUQError(f"'{path}' is not a file that torch.save wrote.") from None
    except (EOFError, RuntimeError, ValueError, LookupError, UnicodeDecodeError):
        raise PosthocUQError(f"'{path}' is damaged, or not a file that torch.save wrote.") from None


def load_weights(model: nn.Module, path: str) -> None:
    """Put the weights of a file into a model.

    What wrappers add to names is ignored: ``module.`` and ``_orig_mod.`` anywhere in the names of the file or the
    model, and ``model.`` in front if all names in the file have it and the model's do not.

    Raises:
        PosthocUQError: the file cannot be read, or its names or shapes are not the model's.
    """
    model_state: dict[str, Tensor] = model.state_dict()
    state = _stripped(read_state(path), model_state)
    missing = [name for name in model_state if name not in state and not name.endswith(_COUNTER)]
    unexpected = [name for name in state if name not in model_state]
    if missing or unexpected:
        parts = [
            f"{verb} {len(names)} ({_first(names)})"
            for verb, names in (("the file lacks", missing), ("the model does not have", unexpected))
            if names
        ]
        raise PosthocUQError(
            f"The weights in '{path}' are not this model's: of {len(model_state)} tensors {', and '.join(parts)}."
        )
    wrong = [name for name in model_state if name in state and model_state[name].shape != state[name].shape]
    if wrong:
        name = wrong[0]
        raise PosthocUQError(
            f"The weights in '{path}' do not fit the model: {len(wrong)} of {len(model_state)} have another shape, "
            f"such as '{name}', {tuple(state[name].shape)} in the file and {tuple(model_state[name].shape)} in the "
            f"model{_class_hint(wrong, state, model_state)}."
        )
    model.load_state_dict(state, strict=False)


def _stripped(state: dict[str, Tensor], model_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    bare_state, model_names = _bare(state), _bare({name: name for name in model_state})
    while all(name.startswith(_PREFIX) for name in bare_state) and not any(
        name.startswith(_PREFIX) for name in model_names
    ):
        bare_state = {name.removeprefix(_PREFIX): value for name, value in bare_state.items()}
    return {model_names.get(name, name): value for name, value in bare_state.items()}


def _bare(named: Mapping[str, Value]) -> dict[str, Value]:
    """By names without what wrappers add, unless two names would become the same."""
    bare = {bare_name(name): value for name, value in named.items()}
    return bare if len(bare) == len(named) else dict(named)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _class_hint(wrong: Sequence[str], state: Mapping[str, Tensor], model_state: Mapping[str, Tensor]) -> str:
    """What to say where only the number of outputs differs."""
    sizes = {tuple(state[name].shape[:1]) for name in wrong}
    same_otherwise = all(state[name].shape[1:] == model_state[name].shape[1:] for name in wrong)
    if same_otherwise and len(sizes) == 1 and len(wrong) <= 2:
        return f"; perhaps --num-classes {next(iter(sizes))[0]}"
    return ""
