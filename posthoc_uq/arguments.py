"""Errors for models that cannot be run on a batch; they say what the model was called with."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from posthoc_uq.arrays import is_array, with_tensors
from posthoc_uq.attempts import out_of_memory
from posthoc_uq.errors import PosthocUQError, UnsupportedLayerError
from posthoc_uq.loaders import Batch, BatchReader, argument_names
from posthoc_uq.randomness import isolated_random_state
from posthoc_uq.replica import model_dtype

CALL = "Pass what model(...) itself takes, with the samples along the first dimension."
LOADER = (
    "A batch is a tensor of inputs, (inputs, targets) or a mapping of the model's named arguments; batch_to_inputs= "
    "takes any other apart."
)

DECODER_INPUTS = (
    "put decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels) into every batch, here and for "
    "predictions."
)

NAMED = (
    "The entries of a mapping are named arguments here: predictor(**mapping), or the mapping itself from the loader or "
    "from batch_to_inputs. A model that takes a whole mapping needs a module around it, with forward(self, **inputs)."
)


def batch_of_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module, device: torch.device
) -> Batch:
    """The arguments of one call of a model; where there are arrays among them, all on its device, as in a loader.

    A single argument may be a batch as the loader gave it, with targets, which are ignored: no model that has a
    posterior takes a whole mapping, list or tuple as its only argument (`count_samples`).
    """
    if len(args) == 1 and not kwargs and _of_a_loader(args[0]):
        read = BatchReader(device, dtype=model_dtype(model), names=argument_names(model)).read(args[0])
        return Batch(read.args, None, read.kwargs)
    if not any(is_array(value) for value in (*args, *kwargs.values())):
        return Batch(args, None, kwargs)
    dtype = model_dtype(model)
    return Batch(with_tensors(args, dtype), None, with_tensors(kwargs, dtype)).to(device)


def _of_a_loader(value: Any) -> bool:
    """Whether a value is a batch of a loader: a mapping, ``[inputs]`` or ``(inputs, targets)``; not two samples."""
    if isinstance(value, Mapping):
        return True
    if type(value) not in (tuple, list) or len(value) not in (1, 2):
        return False
    inputs, targets = value[0], value[-1]
    if not (isinstance(inputs, (Tensor, Mapping, tuple)) or is_array(inputs)):
        return False
    shape = getattr(inputs, "shape", None)
    samples = len(value) == 2 and shape is not None and len(shape) in (1, 3)
    return not (samples and shape == getattr(targets, "shape", None))


@contextmanager
def explained(
    network: Callable[[], nn.Module], batch: Batch, what: str = "these inputs", way_out: str = CALL
) -> Generator[None]:
    """Where the body fails because the model cannot be run on the batch, say what the model was called with.

    To find out, the model is run once by itself after the body has failed. If it runs, the body's error is passed on
    unchanged.

    Args:
        network: gives the model, or a copy of it, to run without gradients.
        batch: the arguments.
        what: the batch, in words.
        way_out: advice for arguments of the right types.

    Raises:
        PosthocUQError: the model cannot be run on the batch, or its outputs do not count the samples; says the shapes,
            the types and the way out.
    """
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        if not isinstance(error, PosthocUQError) or isinstance(error, UnsupportedLayerError):
            _check_run(network(), batch, what, way_out)
        raise


def _check_run(network: nn.Module, batch: Batch, what: str, way_out: str) -> None:
    ids = _Ids(network)
    try:
        with torch.inference_mode(False), torch.no_grad(), isolated_random_state(), ids:
            outputs = batch.copied().call_any(network)
    except Exception as error:  # a model may raise anything
        if out_of_memory(error):
            return
        message = next(iter(str(error).splitlines()), "").rstrip(".")
        raise PosthocUQError(
            f"The model cannot be run on {what}, {described(batch)}. {ids.fault or _advice(network, batch) or way_out} "
            f"The model's own error is {type(error).__name__}: {message}."
        ) from error
    samples = next((tensor.shape[0] for tensor in batch.tensors() if tensor.ndim > 0), None)
    if isinstance(outputs, Tensor) and samples is not None and outputs.shape[:1] != (samples,):
        raise PosthocUQError(
            f"The model gives outputs of shape {tuple(outputs.shape)} for {what}, {described(batch)}; the first "
            f"dimension of both must count the samples. Of one sample, pass x.unsqueeze(0)."
        )


class _Ids(TorchFunctionMode):
    """Checks that embeddings are given ids that they have.

    Attributes:
        fault: the first embedding that was not, in words; empty if there is none.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._names = {id(p): name.removesuffix(".weight") for name, p in network.named_parameters()}
        self.fault = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.embedding, F.embedding_bag) and not self.fault:
            self._look(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _look(self, input: Any, weight: Any, *_: Any, **__: Any) -> None:
        if not isinstance(input, Tensor) or not isinstance(weight, Tensor):
            return
        name = f"Embedding '{self._names[id(weight)]}'" if id(weight) in self._names else "An embedding"
        if input.is_floating_point():
            self.fault = f"{name} takes whole numbers, and was given {_short(input.dtype)}: pass x.long()."
        elif input.numel() and not 0 <= int(input.min()) <= int(input.max()) < len(weight):
            self.fault = (
                f"{name} has rows 0 to {len(weight) - 1}, and was given ids from {int(input.min())} to "
                f"{int(input.max())}; is the tokenizer another one's?"
            )


def described(batch: Batch) -> str:
    """Type and shape of every argument of a model, such as ``float32 (8, 3, 32, 32)``."""
    named = [f"{name}={_kind(value)}" for name, value in batch.kwargs.items()]
    return ", ".join([*map(_kind, batch.args), *named]) or "no argument"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_short(value.dtype)} {tuple(value.shape)}"
    if is_array(value):
        return f"{type(value).__name__} {tuple(value.shape)}"
    tensors = isinstance(value, (list, tuple)) and all(isinstance(part, Tensor) for part in value)  # pyright: ignore[reportUnknownVariableType]
    count = f" of {len(value)} tensors" if tensors else ""  # pyright: ignore[reportUnknownArgumentType]
    return f"a {type(value).__name__}{count}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _advice(network: nn.Module, batch: Batch) -> str:
    """Advice for arguments whose kind or number type does not fit the model; empty without any."""
    if whole_mapping(batch):
        return NAMED
    if lacks_decoder_inputs(network, batch):
        return f"Its decoder needs inputs too, and the labels were taken out of the batch as targets: {DECODER_INPUTS}"
    if advice := _other_names(network, batch):
        return advice
    weights_dtype = model_dtype(network)
    input_dtypes = [value.dtype for value in batch.tensors()]
    if any(is_array(value) for value in (*batch.args, *batch.kwargs.values())):
        return f"Pass tensors: torch.as_tensor(x, dtype={weights_dtype})."
    if any(dtype.is_floating_point and dtype != weights_dtype for dtype in input_dtypes):
        return f"Its weights are {_short(weights_dtype)}: pass x.to({weights_dtype})."
    if input_dtypes and not any(dtype.is_floating_point for dtype in input_dtypes):
        return f"Its weights are {_short(weights_dtype)}: pass x.to({weights_dtype}), unless the model takes integers."
    return ""


def whole_mapping(batch: Batch) -> bool:
    """Whether an argument is a mapping that holds the tensors."""
    return not batch.tensors() and any(isinstance(value, Mapping) for value in batch.args)


def lacks_decoder_inputs(network: nn.Module, batch: Batch) -> bool:
    """Whether a model of transformers with an encoder and a decoder is called without inputs of the decoder."""
    if not getattr(getattr(network, "config", None), "is_encoder_decoder", False):
        return False
    return len(batch.args) < 2 and not {"decoder_input_ids", "decoder_inputs_embeds"} & set(batch.kwargs)


def _other_names(network: nn.Module, batch: Batch) -> str:
    """Advice for a batch that names arguments which the model does not have; empty if it has them."""
    parameters = argument_names(network)
    stray = [name for name in batch.kwargs if name not in (parameters or batch.kwargs)]
    if parameters is None or not stray:
        return ""
    if len(parameters) == 1:
        (only,) = parameters
        return (
            f"The model takes one argument, '{only}': pass batch_to_inputs=lambda batch: batch[{stray[0]!r}]; if it "
            f"takes the whole mapping, put it into a module with forward(self, **inputs) that calls it."
        )
    return (
        f"The model takes {list(parameters)}, and the batch names {list(batch.kwargs)}: give it those names with "
        f"batch_to_inputs=lambda batch: dict(...)."
    )
