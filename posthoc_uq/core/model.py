"""Copies of a model that share its weights, so that the user's model is never touched; forward-mode derivatives of it.

Hooks, training flags, ``requires_grad`` and gradients belong to a copy; the weights are the model's own memory.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from hashlib import sha256
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.rnn import PackedSequence
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from posthoc_uq.core.devices import has_double
from posthoc_uq.core.errors import PosthocUQError, out_of_memory
from posthoc_uq.core.options import did_you_mean

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_PARAMETRIZATIONS = tuple(
    getattr(parametrizations, name) for name in ("_WeightNorm", "_SpectralNorm", "_Orthogonal")
)
_COMPILED = "_orig_mod"  # the attribute in which `torch.compile` holds a model
_PARALLEL = "module"  # the same of `DataParallel` and `DistributedDataParallel`


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, `nn.DataParallel` and `DistributedDataParallel`, or the model itself.

    With it, names are the same with and without these wrappers, and nothing runs on several devices at once.
    """
    if not isinstance(model, nn.Module):
        raise PosthocUQError(
            f"The model must be a torch.nn.Module, not a {type(model).__name__}; it is the first argument of uq.fit "
            f"and uq.wrap, and the second of uq.load."
        )
    parallel = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    inner = getattr(model, _PARALLEL if parallel else _COMPILED, None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def bare_name(name: str) -> str:
    """A parameter's name without the parts that wrappers of the model, or of its parts, put into it."""
    return ".".join(part for part in name.split(".") if part not in (_COMPILED, _PARALLEL))


def other_name(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that differs from `name` by wrappers only, or None."""
    return next((other for other in names if bare_name(other) == bare_name(name)), None)


def replicate(model: nn.Module, parameters: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A structural copy of `model` in eval mode, whose parameters share storage with the model's and need no
    gradient.

    Args:
        model: any module that `copy.deepcopy` can copy.
        parameters: tensors by name that replace the model's own, on the device of these; an `nn.Parameter` is used as
            it is, so that several replicas can hold the same one.

    Raises:
        PosthocUQError: the model cannot be copied (scripted, lazy, or holding something that has no copy).
    """
    model = unwrap(model)
    _check_not_scripted(model)
    replacements = parameters or {}
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise PosthocUQError(
                f"Parameter '{name}' is not initialised yet; run the model once on a batch first."
            )
        replacement = replacements.get(name, parameter)
        if name not in replacements or not isinstance(replacement, nn.Parameter):
            replacement = nn.Parameter(replacement.detach().to(parameter.device), requires_grad=False)
        memo[id(parameter)] = replacement
    by_hand = list[nn.Module]()
    for module in model.modules():
        if _is_its_attributes(type(module)):
            by_hand.append(module)
            memo[id(module)] = object.__new__(type(module))
        for name, value in list(vars(module).items()):
            if name in _OF_EVERY_MODULE or type(value) in _IMMUTABLE:
                continue
            for tensor in cast(list[Any], value) if isinstance(value, list) else [value]:
                if isinstance(tensor, Tensor) and not tensor.is_leaf:
                    # Left from the last pass, like a feature map, or weights that a hook or a recurrent layer's
                    # parametrization computes; it has no deep copy.
                    memo[id(tensor)] = tensor.detach().clone()
    try:
        # a deep copy would look at each of their flags, and at a dozen empty tables of hooks
        for module in by_hand:
            state = dict(vars(module))
            for name, value in state.items():
                if name in _OF_EVERY_MODULE and not value:
                    state[name] = type(value)()
                elif type(value) not in _IMMUTABLE:
                    state[name] = copy.deepcopy(value, memo)
            memo[id(module)].__setstate__(state)
        twin = copy.deepcopy(model, memo)
    except Exception as error:  # whatever a module may hold: locks, open files
        if out_of_memory(error):
            raise
        raise PosthocUQError(
            f"The model cannot be copied ({type(error).__name__}: {error}); drop what has no copy from its "
            f"attributes{_culprit(model, memo)}."
        ) from error
    for module in twin.modules():
        if isinstance(module, nn.RNNBase) and _note_places not in vars(module)["_forward_pre_hooks"].values():
            module.register_forward_pre_hook(_note_places, with_kwargs=True)
    return twin.eval()


_IMMUTABLE = frozenset({type(None), bool, int, float, str})
_OF_EVERY_MODULE = frozenset(name for name, value in vars(nn.Module()).items() if value is not None)


@lru_cache(maxsize=256)
def _is_its_attributes(kind: type[nn.Module]) -> bool:
    """Whether a module of this class is copied as its attributes: neither it nor a class between has another way."""
    ways = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__")
    slots = any(vars(each).get("__slots__") for each in kind.__mro__)
    return not slots and all(getattr(kind, way, None) is getattr(nn.Module, way, None) for way in ways)


def _note_places(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let the function that a recurrent layer calls know which samples the rows of a packed sequence belong to, which
    torch does not hand on to it.
    """

    def noted(value: Any) -> Any:
        if not isinstance(value, PackedSequence):
            return value
        sizes, places = value.batch_sizes.detach(), value.unsorted_indices
        cast(Any, sizes).places = torch.arange(int(sizes[0]), device="cpu") if places is None else places
        return value._replace(batch_sizes=sizes)

    return tuple(map(noted, args)), {name: noted(value) for name, value in kwargs.items()}


def places_of_samples(batch_sizes: Tensor) -> Tensor | None:
    """The places of the samples of a packed sequence among those sorted by length, from its batch sizes as a replica's
    recurrent layer hands them on; None elsewhere.
    """
    return getattr(batch_sizes, "places", None)


def _attributes(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Attributes of modules besides parameters, buffers and modules: name of the module, of the attribute, value."""
    for module_name, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                yield module_name, name, value


def _culprit(model: nn.Module, memo: Mapping[int, Any]) -> str:
    """The first attribute that cannot be copied, in words; empty where it is hidden more deeply."""
    for module_name, name, value in _attributes(model):
        try:
            copy.deepcopy(value, dict(memo))
        except Exception as error:  # as above
            if out_of_memory(error):
                raise
            return f": '{name}' of {f'module {module_name!r}' if module_name else 'the model itself'} is one"
    return ""


def check_usable(model: nn.Module) -> None:
    """Refuse a model whose weights no posterior can be over: by the form of the model, or of its tensors.

    Raises:
        PosthocUQError: it is a TorchScript module, or has no parameters; or one of them is sparse, or a parameter or a
            buffer has a shape and no numbers.
    """
    _check_not_scripted(model)
    model_device(model)
    for name, tensor in model.named_parameters():
        if tensor.layout != torch.strided:
            raise PosthocUQError(
                f"Parameter '{name}' is sparse ({tensor.layout}), and a posterior is over dense weights; make it "
                f"torch.nn.Parameter({name}.detach().to_dense()), and multiply by it with x @ w."
            )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise PosthocUQError(
                f"'{name}' is on the meta device, where a tensor has a shape and no numbers; build the model on the "
                f"CPU or a GPU, outside of torch.device('meta'), and load its weights there (in transformers, "
                f"from_pretrained without device_map)."
            )


def _check_not_scripted(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise PosthocUQError(
            "The model is a TorchScript module (torch.jit.script, trace, freeze or load), whose passes nothing can "
            "follow; pass the original nn.Module with these weights."
        )


def check_differentiable(model: nn.Module) -> None:
    """Refuse a model that was made under ``torch.inference_mode()``.

    Raises:
        PosthocUQError: it has parameters or buffers that cannot take part in differentiation.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not nn.parameter.is_lazy(tensor) and tensor.is_inference():
            raise PosthocUQError(
                f"'{name}' was made under torch.inference_mode(), and nothing can be differentiated through it; build "
                f"the model outside of that, and give it these numbers with fresh.load_state_dict(model.state_dict())."
            )


def untied(model: nn.Module, layer: str) -> nn.Module:
    """A copy of `model`, on the same memory and in eval mode, in which one layer no longer shares its parameters.

    For two layers with one weight that cannot be followed through both: in the copy each has a posterior of its own
    use. Fit, load and wrap the copy. A layer that shares its weight with an embedding, as the last one of GPT-2 does,
    needs none of this: `fit` takes its use by itself.

    Args:
        model: the model.
        layer: name of the module that shares parameters with others.

    Raises:
        PosthocUQError: there is no such module, or it shares none.

    Example:
        ```python
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        net[2].weight = net[0].weight  # shared by two layers
        loose = uq.untied(net, "2")
        assert loose[2].weight is not loose[0].weight
        ```
    """
    twin = _with_flags(model)
    modules = dict(twin.named_modules())
    if layer not in modules:
        raise PosthocUQError(
            f"The model has no module '{layer}'; there are {list(modules)[1:6]}, ...{did_you_mean(layer, modules)}"
        )
    holders = owners(twin)
    shared = [p for p in modules[layer].named_parameters(recurse=False) if len(holders[id(p[1])]) > 1]
    if not shared:
        raise PosthocUQError(
            f"Module '{layer}' shares no parameter with another one; fit the model as it is."
        )
    for attribute, parameter in shared:
        setattr(modules[layer], attribute, nn.Parameter(parameter.detach(), parameter.requires_grad))
    return twin


def with_plain_weights(model: nn.Module) -> nn.Module:
    """`model`, or a copy of it in eval mode in which the weights that torch's weight norm, spectral norm and orthogonal
    parametrization compute in every pass, by hooks or by `torch.nn.utils.parametrizations`, are parameters with the
    values that they have in eval mode. A posterior is then over the weights themselves. Of other parametrizations, such
    as a mask, that would not be so: what they fix would become uncertain.

    Args:
        model: any module; parameters that are not computed stay on its memory, and keep their ``requires_grad``.
    """
    if not any(_normed(module) or _norms(module) for module in model.modules()):
        return model
    # a user may predict in inference mode, whose tensors cannot say whether they are trained
    with torch.inference_mode(False), torch.no_grad():
        return _without_norms(model)


def _without_norms(model: nn.Module) -> nn.Module:
    twin = _with_flags(model)
    for module in list(twin.modules()):
        for hook in _norms(module):
            remove = remove_weight_norm if isinstance(hook, WeightNorm) else remove_spectral_norm
            parts = [getattr(module, f"{hook.name}_{part}", None) for part in ("g", "v", "orig")]
            remove(module, hook.name).get_parameter(hook.name).requires_grad_(_trained(parts))
        if _normed(module):
            # by hand: torch's own function takes the property from the class, which the user's module has, too
            values = {
                name: nn.Parameter(getattr(module, name).detach(), _trained(steps.parameters()))
                for name, steps in cast(nn.ModuleDict, module.parametrizations).items()
            }
            del module.parametrizations
            module.__class__ = type(module).__bases__[0]
            for name, value in values.items():
                module.register_parameter(name, value)
    return twin


def _with_flags(model: nn.Module) -> nn.Module:
    """A replica whose parameters require gradients where the model's do."""
    twin, own = replicate(model), dict(unwrap(model).named_parameters())
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(own[name].requires_grad)
    return twin


def _trained(parts: Iterable[Tensor | None]) -> bool:
    """Whether a weight that is computed from these is trained."""
    return any(part is not None and part.requires_grad for part in parts)


def _normed(module: nn.Module) -> bool:
    """Whether a module's parametrizations are all torch's own of a whole weight."""
    if not parametrize.is_parametrized(module):
        return False
    lists = cast(nn.ModuleDict, module.parametrizations).values()
    return all(isinstance(each, _PARAMETRIZATIONS) for several in lists for each in cast(Any, several))


def _norms(module: nn.Module) -> list[WeightNorm | SpectralNorm]:
    """The hooks by which a module computes weights in every pass."""
    return [
        hook
        for hook in vars(module)["_forward_pre_hooks"].values()
        if isinstance(hook, (WeightNorm, SpectralNorm))
    ]


def with_separate_embedding_weight(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """`model`, or a replica of it in which parameters of these names are not shared with an embedding.

    Where an embedding and other modules share one of them, the others get another parameter, in common, on the same
    memory: a posterior over it is then one of their use, and the embedding stays certain. What the replica is follows
    from the model and the names, so that a file needs no record of it.

    Args:
        model: any module.
        names: of parameters, by any of the names that tied ones have; unknown ones are passed over.
    """
    wanted = set(names)

    def asked(given: nn.Module) -> list[list[tuple[str, str]]]:
        return [
            places
            for places in tied_to_embedding(given).values()
            if wanted & {f"{module}.{attribute}".lstrip(".") for module, attribute in places}
        ]

    if not asked(unwrap(model)):
        return model
    twin = _with_flags(model)
    for places in asked(twin):
        shared = twin.get_submodule(places[0][0]).get_parameter(places[0][1])
        separate = nn.Parameter(shared.detach(), shared.requires_grad)
        for module, attribute in places:
            setattr(twin.get_submodule(module), attribute, separate)
    return twin


def tied_to_embedding(model: nn.Module) -> dict[str, list[tuple[str, str]]]:
    """Parameters that an embedding shares with other modules: the embedding's name, and where the others hold it, as
    their names and attributes.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for places in owners(model).values():
        inside = [name for name, _, module in places if isinstance(module, EMBEDDINGS)]
        others = [
            (name, attribute) for name, attribute, module in places if not isinstance(module, EMBEDDINGS)
        ]
        if inside and others:
            found[inside[0]] = others
    return found


Owner = tuple[str, str, nn.Module]  # a module's name, the attribute that holds a parameter, the module


def owners(model: nn.Module) -> dict[int, list[Owner]]:
    """For every parameter's identity, the modules that hold it."""
    holders: dict[int, list[Owner]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append((module_name, attribute, module))
    return holders


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that predictions depend on, by name: those of floating-point numbers that are in the model's state
    dict, such as the statistics of batch normalisation. Counters are no such numbers.
    """
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point() and key not in vars(module).get("_non_persistent_buffers_set", ())
    }


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Name of every parameter by the identity of its tensor."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def model_device(model: nn.Module) -> torch.device:
    """Device of the first parameter.

    Raises:
        PosthocUQError: the model has no parameters.
    """
    for parameter in model.parameters():
        return parameter.device
    raise PosthocUQError(
        f"The model has no parameters, so there is nothing to be uncertain about{_without(model)}."
    )


def _without(model: nn.Module) -> str:
    """Why a model has no parameters, in words; empty where it cannot be told."""
    for name, module in model.named_modules():
        if "quantized" in type(module).__module__.split("."):
            return (
                f": '{name}' ({type(module).__name__}) is quantised, and its whole numbers are none; leave the last "
                f"layer in floating point, or fit the model as it was before"
            )
        if isinstance(module, torch.jit.ScriptModule):
            return f": '{name}' is a TorchScript module that was frozen; pass the original nn.Module"
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.ndim > 1:
            return f": its weights are buffers, as '{name}' is; make them torch.nn.Parameter"
    return ""


def model_dtype(model: nn.Module) -> torch.dtype:
    """Number type of the first parameter of floating-point numbers; float32 where there is none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def statistics_dtype(model: nn.Module, dtype: torch.dtype | None) -> torch.dtype:
    """The number type of the statistics: float32, or float64 if the model has it or if it is asked for.

    Raises:
        PosthocUQError: `dtype` is neither of the two, or the model's device does not have it.
    """
    if dtype is None:
        wide = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        return torch.float64 if wide else torch.float32
    if dtype not in (torch.float32, torch.float64):
        raise PosthocUQError(f"dtype must be torch.float32 or torch.float64, not {dtype}.")
    if dtype == torch.float64 and not has_double(model_device(model)):
        raise PosthocUQError(
            f"dtype=torch.float64 is a type that '{model_device(model)}', the model's device, does not have; leave "
            f"dtype out, or move the model to the CPU."
        )
    return dtype


# torch counts the levels of forward differentiation for the process, not for a thread: threads take turns
_FORWARD_LEVELS = threading.RLock()


def jvp(
    function: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    needed_by: str,
    way_out: str,
) -> tuple[Any, Any]:
    """`torch.func.jvp`: what a function gives, and its derivative along the tangents.

    Raises:
        PosthocUQError: an operation has no forward derivative; it names what needs one, and the way out.
    """
    _load_forward_rules()
    try:
        with _FORWARD_LEVELS:
            return cast(Any, torch.func.jvp(function, primals, tangents))  # pyright: ignore[reportPrivateImportUsage]
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if not any(word in reason for word in ("forward AD", "forward mode", "autograd.Function")):
            raise
        raise PosthocUQError(
            f"{needed_by} forward derivatives, and the model has an operation without one ({reason}); {way_out}."
        ) from error


@cache
def _load_forward_rules() -> None:
    """Load torch's rules before the first derivative does so: they are scripts, and some versions of torch
    then warn that scripts are deprecated.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit", category=Warning)
        try:
            import torch._decomp.decompositions_for_jvp  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ImportError:  # a version of torch that keeps them elsewhere
            return


def fingerprint(parameters: Mapping[str, Tensor]) -> str:
    """SHA-256 over the parameters in the order of their names, as hexadecimal digits.

    Each gives a line ``name dtype shape`` (``fc.weight float32 10,84``), then its numbers, row-major and
    little-endian; of a sparse one the places, as int64, and the numbers that are there; of one that is made of others,
    as torchao's whole numbers and their scales, those of all of them.
    """
    digest = sha256()
    for name in sorted(parameters):
        tensor = parameters[name].detach().cpu()
        plain = type(tensor) is Tensor and tensor.layout == torch.strided
        parts = [tensor] if plain else _plain_parts(tensor)
        shape = ",".join(str(size) for size in tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name} {dtype} {shape}\n".encode(errors="surrogatepass"))
        for part in parts:
            digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _plain_parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that hold the numbers of a tensor."""
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in cast(Any, tensor).__tensor_flatten__()[0]]
        return [part for each in inner if isinstance(each, Tensor) for part in _plain_parts(each)]
    if tensor.layout == torch.strided:
        return [tensor]
    sparse = tensor.to_sparse_coo().coalesce()
    return [sparse.indices(), sparse.values()]
