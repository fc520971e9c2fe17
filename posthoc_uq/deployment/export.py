"""Predictors as modules that `torch.export` and ONNX can take: tensors in, a named tuple of tensors out."""

from __future__ import annotations

import inspect
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posthoc_uq.core.batches import Batch
from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import PosthocUQError, warn_user
from posthoc_uq.core.model import unwrap
from posthoc_uq.core.outputs import output_tensor
from posthoc_uq.files import atomic
from posthoc_uq.heads.moments import MomentsPredictor
from posthoc_uq.heads.predictor import Predictor, divisor_of
from posthoc_uq.heads.sampling import SamplingPredictor
from posthoc_uq.likelihoods.class_prediction import ClassPrediction
from posthoc_uq.likelihoods.conformal import Promises, class_scores, p_values, set_of
from posthoc_uq.likelihoods.prediction import Prediction, PromisedClassTensors, PromisedValueTensors

_MAX_BATCH = (
    2**16 - 1
)  # samples of an exported program: the most that torch's batch normalisation takes on a GPU


class _Program(nn.Module):
    """A predictor as a module; what it returns begins with the tensors of its predictions, and goes on with what the
    posterior promises, if it does. A sampling head runs draw by draw, the simplest program, however the predictor
    itself does it.
    """

    def __init__(self, predictor: MomentsPredictor | SamplingPredictor, level: float) -> None:
        super().__init__()
        sampling = isinstance(predictor, SamplingPredictor)
        self.members = nn.ModuleList(predictor.ensemble.members()) if sampling else None
        self.predictor = None if sampling else predictor
        self._posterior, promises = predictor.posterior, predictor.promises
        self._promises: Promises | None = None
        if isinstance(promises, Promises) and promises.kind in ("lac", "deviation"):
            self._promises = promises
        self._thresholds = None if self._promises is None else self._promises.thresholds(level)

    def _predicted(self, *args: Any) -> Prediction:
        if self.members is None:
            assert self.predictor is not None
            return self.predictor(*args)
        outputs = torch.stack([output_tensor(member(*args)).float() for member in self.members])
        posterior = self._posterior.snapshot()
        divisor = divisor_of(posterior)
        if divisor != 1.0:
            outputs = outputs / divisor
        return posterior.observation.from_draws(outputs)

    def forward(self, *args: Any) -> NamedTuple:
        prediction = self._predicted(*args)
        found: Any = prediction.tensors()
        if self._promises is None or self._thresholds is None:
            return found
        held_out = self._promises.inputs[prediction.default_score]
        if isinstance(prediction, ClassPrediction):
            chosen = set_of(prediction.probs, class_scores(as_double(prediction.probs)), self._thresholds)
            return PromisedClassTensors._make((*found, chosen, p_values(held_out, found.entropy)))
        deviation = found.variance.sqrt()
        score = deviation
        if deviation.ndim > 1:  # a node named "mean" would have the name of an output
            score = deviation.flatten(1).sum(1) / deviation[0].numel()
        width = deviation * self._thresholds.to(deviation)
        bounds = found.mean - width, found.mean + width
        return PromisedValueTensors._make((*found, *bounds, p_values(held_out, score)))


def exportable(predictor: Predictor, level: float = 0.9) -> nn.Module:
    """A predictor as a module for `torch.export.export(module, (x,), strict=False)` and `torch.onnx.export`.

    Its positional arguments are the model's, its output is `ClassTensors` or `ValueTensors`; where the posterior has
    held-out scores for this head (`posthoc_uq.calibrate`), and sets need no random numbers, `PromisedClassTensors` or
    `PromisedValueTensors`. It shares the predictor's tensors.

    The moments head becomes one pass with means and variances, the sampling head `n_samples` passes, with all drawn
    weights in the file. To run a saved program elsewhere, import `posthoc_uq` first, which defines the tuple's class;
    an ONNX file does not need it. The linearised head needs backward passes, which programs cannot hold: its posterior
    is exported as the sampling head, with a warning.

    Args:
        predictor: to be exported.
        level: of sets and intervals.
    """
    if not isinstance(predictor, Predictor):
        raise PosthocUQError(
            f"export takes a predictor from uq.wrap(model, posterior), not a {type(predictor).__name__}."
        )
    predictor.check_weights()  # programs hold weights, and check none
    if not isinstance(predictor, (MomentsPredictor, SamplingPredictor)):
        head, predictor = predictor.head, SamplingPredictor(predictor.model, predictor.posterior)
        warn_user(
            f"head={head!r} cannot be exported, because it needs backward passes: the program has "
            f"{predictor.n_samples} draws of the weights in its place; wrap with head='moments' or head='sampling' to "
            f"choose."
        )
    return _Program(predictor, level).eval()


def export(
    predictor: Predictor,
    *inputs: Tensor,
    path: str | os.PathLike[str] | None = None,
    level: float = 0.9,
    dynamic_batch: bool = True,
) -> torch.export.ExportedProgram:
    """A predictor as a program without Python, by `torch.export`, and as a file of it.

    The outputs are those of `exportable`. An ONNX file names them by the fields of their tuple, and its inputs by the
    arguments of the model's ``forward``.

    Args:
        predictor: of the head "moments" or "sampling"; a linearised one is exported as the sampling head, with a
            warning.
        inputs: an example of the model's positional arguments, of at least two samples.
        path: of a file to write: ``"model.onnx"``, or ``"model.pt2"`` for `torch.export.load`.
        level: of the sets and intervals, where the posterior has held-out scores for this head.
        dynamic_batch: let the exported program take any number of samples.

    Raises:
        PosthocUQError: the inputs are no tensors, the model cannot be run on them, the file has another name or cannot
            be written (an old one then stays), or the packages onnx and onnxscript are not installed.
    """
    kind = None if path is None else os.path.splitext(os.fspath(path))[1]
    if kind not in (None, ".onnx", ".pt2"):
        raise PosthocUQError(f"export writes files whose name ends in .onnx or .pt2, not '{path}'.")
    target = None if path is None else atomic.checked_target(path)
    if kind == ".onnx" and (find_spec("onnx") is None or find_spec("onnxscript") is None):
        raise PosthocUQError("ONNX files need two packages more: pip install onnx onnxscript")
    if not inputs or not all(isinstance(value, Tensor) for value in inputs):
        raise PosthocUQError(
            "export takes an example of the model's inputs as tensors: uq.export(predictor, x)."
        )
    module = exportable(predictor, level)
    batch = torch.export.Dim("batch", min=1, max=_MAX_BATCH)
    shapes: Any = (tuple({0: batch} for _ in inputs),) if dynamic_batch else None
    with torch.no_grad():
        with predictor.explaining(Batch(inputs)):
            module(*inputs)  # tensors that are made once and cached must be made before tracing
        program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    if target is None:
        return program
    try:
        if kind == ".onnx":
            _write_onnx(program, inputs, unwrap(predictor.model), target)
        else:
            with atomic.replacing(target) as file:
                torch.export.save(program, file)
    except OSError as error:
        raise PosthocUQError(f"'{target}' could not be written: {error.strerror or error}.") from error
    return program


def _write_onnx(
    program: torch.export.ExportedProgram, inputs: tuple[Tensor, ...], model: nn.Module, target: Path
) -> None:
    """Write the program, and beside it a file with the weights, which is put in place first."""
    fields: Any = program.call_spec.out_spec.context  # pyright: ignore[reportOptionalMemberAccess]
    arguments = inspect.signature(model.forward).parameters.values()
    names = [a.name for a in arguments if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)][: len(inputs)]
    onnx = torch.onnx.export(
        program,
        inputs,
        input_names=names if len(names) == len(inputs) else None,
        output_names=list(fields._fields),
        verbose=False,
    )
    assert onnx is not None
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.stem[:50]}.") as folder:
        onnx.save(Path(folder, target.name), external_data=True)
        for part in sorted(Path(folder).iterdir(), reverse=True):
            with part.open("rb") as source, atomic.replacing(target.with_name(part.name)) as file:
                shutil.copyfileobj(source, file)
