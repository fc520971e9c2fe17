"""Messages about weights without a posterior: what ties or computes them, and their share of all weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from posthoc_uq.curvature.capture import Owner

_NAMED = 5  # parameters that a message names
# Suffixes that torch's hooks give the parameters a weight is computed from, and the functions that undo the hooks.
_HOOKS = {"_g": "remove_weight_norm", "_v": "remove_weight_norm", "_orig": "remove_spectral_norm"}


def home_of(owner: Owner, modules: Mapping[str, nn.Module]) -> tuple[str, nn.Module]:
    """The module that a parameter belongs to; with a parametrization, the module whose weight is computed from it."""
    name, _, module = owner
    parent, parametrized, _ = f".{name}".rpartition(".parametrizations.")
    return (parent[1:], modules[parent[1:]]) if parametrized else (name, module)


def why_not_caught(parameter: str, owner: Owner, modules: Mapping[str, nn.Module]) -> str:
    """Why no use of a layer's weight was seen, and what to do about it."""
    name, attribute, _ = owner
    layer = f"model.get_submodule('{home_of(owner, modules)[0]}')"
    _, parametrized, tensor = f".{name}".rpartition(".parametrizations.")
    hook = next((_HOOKS[suffix] for suffix in _HOOKS if attribute == f"weight{suffix}"), None)
    if parametrized:
        remedy = f"torch.nn.utils.parametrize.remove_parametrizations({layer}, '{tensor}')"
    elif hook is not None:
        remedy = f"torch.nn.utils.{hook}({layer})"
    else:
        return f"its weight '{parameter}' is used in a way that cannot be caught"
    return (
        f"its weight is computed from '{parameter}' in every pass, and a posterior belongs on the weight itself; call "
        f"model.eval() and {remedy}, which keeps the weight as it is"
    )


def why_not_rebuilt(parameter: str, holders: Sequence[tuple[str, str]], both_ways: bool) -> str:
    """Why the caught parts do not add up to a layer's gradient, and what to do about it.

    Args:
        parameter: the layer's weight.
        holders: names and types of the modules that hold the weight, the layer's own first.
        both_ways: whether the weight is used both as it is and transposed.
    """
    if len(holders) < 2 and both_ways:
        return (
            f"its weight '{parameter}' is used both as it is and transposed, as in x @ W and h @ W.T, and a posterior "
            f"follows one of these alone; give one of the uses a parameter of its own, "
            f"torch.nn.Parameter(W.detach().clone()), or leave the layer out with layers=[...]"
        )
    if len(holders) < 2:
        return "what was caught does not rebuild its gradient"
    layer, shared = holders[0][0], " and ".join(f"'{name}' ({kind})" for name, kind in holders)
    return (
        f"its weight '{parameter}' is tied: {shared} share it, and not all of these uses can be followed; for a "
        f"posterior of the uses in '{layer}' alone, fit and wrap posthoc_uq.untied(model, '{layer}')"
    )


def without_posterior(
    parameters: Mapping[str, Tensor], kinds: Mapping[str, str], covered: Collection[str]
) -> str | None:
    """A message on the used weight matrices without a posterior, with their share of all weights; None if there are
    none.

    Args:
        parameters: all parameters of the model, by name.
        kinds: parameters that were used in the forward pass and asked for, with the type of their module.
        covered: parameters with a posterior.
    """
    missing = [name for name in kinds if name not in covered and _is_matrix(parameters[name])]
    if not missing:
        return None
    total = sum(p.numel() for p in parameters.values() if p.is_floating_point())
    missing.sort(key=lambda name: -parameters[name].numel())
    shown = [
        f"'{name}' ({kinds[name]}, {_share(parameters[name].numel(), total)})" for name in missing[:_NAMED]
    ]
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    summed = _share(sum(parameters[name].numel() for name in missing), total)
    return (
        f"Weights without a posterior, {summed} of all weights: {', '.join(shown)}{more}. Predictions take them for "
        f"certain. What is used through torch.nn.functional.linear, a convolution or a product x @ weight gets a "
        f"posterior; choosing layers by layers=[...] leaves out what is not to have one."
    )


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and sum(size > 1 for size in parameter.shape) >= 2


def _share(part: int, total: int) -> str:
    return f"{100 * part / total:.2g}%" if part < total else "100%"
