"""Predictors as modules that `torch.export` and ONNX can take: tensors in, a named tuple of tensors out."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.heads.classification import ClassPrediction
from posthoc_uq.heads.moments import MomentsPredictor
from posthoc_uq.heads.prediction import Prediction, predict
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.sampling import SamplingPredictor
from posthoc_uq.loaders import Batch, output_tensor


class ClassTensors(NamedTuple):
    """A classification at the boundary of an exported program; see `ClassPrediction`.

    Attributes:
        probs: (batch, classes).
        logits_mean: (batch, classes), or (batch, 1) for one logit.
        logits_variance: of the same shape.
        entropy: (batch,), in nats.
        mutual_information: (batch,), in nats; NaN with ``link="probit"`` or ``"bridge"``, which do not know it.
    """

    probs: Tensor
    logits_mean: Tensor
    logits_variance: Tensor
    entropy: Tensor
    mutual_information: Tensor


class ValueTensors(NamedTuple):
    """A regression at the boundary of an exported program; see `RegressionPrediction`.

    Attributes:
        mean: (batch,) or (batch, outputs).
        variance: of the same shape: weights and noise together.
        epistemic_variance: of the same shape: the weights' part.
    """

    mean: Tensor
    variance: Tensor
    epistemic_variance: Tensor


for _kind in (ClassTensors, ValueTensors):  # so that an exported program can name its outputs in a file
    pytree._register_namedtuple(  # pyright: ignore[reportPrivateUsage]
        _kind, serialized_type_name=f"posthoc_uq.{_kind.__name__}"
    )


def tensors_of(prediction: Prediction) -> ClassTensors | ValueTensors:
    """A prediction as a named tuple of tensors."""
    if isinstance(prediction, ClassPrediction):
        entropy = prediction.entropy()
        known = prediction.sample_entropy is not None
        information = prediction.mutual_information() if known else torch.full_like(entropy, float("nan"))
        return ClassTensors(
            prediction.probs, prediction.logits_mean, prediction.logits_variance, entropy, information
        )
    return ValueTensors(prediction.mean, prediction.variance, prediction.epistemic_variance)


class _Moments(nn.Module):
    def __init__(self, predictor: MomentsPredictor) -> None:
        super().__init__()
        self.predictor = predictor

    def forward(self, *args: Any) -> ClassTensors | ValueTensors:
        return tensors_of(self.predictor(*args))


class _Sampling(nn.Module):
    """The ensemble draw by draw: the plainest program, whatever route the predictor itself takes."""

    def __init__(self, predictor: SamplingPredictor) -> None:
        super().__init__()
        self.members = nn.ModuleList(predictor.ensemble.members())
        self._posterior = predictor.posterior

    def forward(self, *args: Any) -> ClassTensors | ValueTensors:
        outputs = torch.stack([output_tensor(member(*args)).float() for member in self.members])
        posterior = self._posterior.snapshot()
        if posterior.temperature != 1.0:
            outputs = outputs / posterior.temperature
        return tensors_of(predict(outputs, posterior))


def exportable(predictor: Predictor) -> nn.Module:
    """A predictor as a module for `torch.export.export(module, (x,), strict=False)` and `torch.onnx.export`.

    Its positional arguments are the model's, its output is `ClassTensors` or `ValueTensors`. It shares the predictor's
    tensors. The moments head becomes one pass with means and variances, the sampling head `n_samples` passes, with all
    drawn weights in the file. To run a saved program elsewhere, import `posthoc_uq` first, which knows the tuple's
    name; an ONNX file needs nothing. The linearised head needs backward passes, which no program holds: weights are
    drawn from its posterior in its place, with a warning.
    """
    return _exportable(predictor, stacklevel=4)


def _check_inputs(inputs: tuple[Any, ...]) -> None:
    if not inputs or not all(isinstance(value, Tensor) for value in inputs):
        given = ", ".join(f"a {type(value).__name__}" for value in inputs) or "nothing"
        raise PosthocUQError(
            f"export takes a predictor and an example of the model's inputs as tensors, uq.export(predictor, x), and "
            f"was given {given}; torch.as_tensor(x) makes a tensor of an array."
        )


def _exportable(predictor: Any, stacklevel: int) -> nn.Module:
    if not isinstance(predictor, Predictor):
        raise PosthocUQError(
            f"export takes a predictor from uq.wrap(model, posterior), not a {type(predictor).__name__}."
        )
    if isinstance(predictor, MomentsPredictor):
        return _Moments(predictor).eval()
    if not isinstance(predictor, SamplingPredictor):
        predictor = _drawn(predictor, stacklevel)
    return _Sampling(predictor).eval()


def _drawn(predictor: Predictor, stacklevel: int) -> SamplingPredictor:
    """Drawn weights of the same model and posterior, and a warning that says so."""
    drawn = SamplingPredictor(predictor.model, predictor.posterior)
    warnings.warn(
        f"head={predictor.head!r} cannot be exported, because it needs backward passes: the program has "
        f"{drawn.n_samples} draws of the weights in its place, whose predictions differ somewhat; wrap with "
        f"head='moments' or head='sampling' to choose.",
        UserWarning,
        stacklevel=stacklevel,
    )
    return drawn


def export(predictor: Predictor, *inputs: Tensor, dynamic_batch: bool = True) -> torch.export.ExportedProgram:
    """`torch.export.export` of a predictor, for ``torch.export.save(program, "m.pt2")``.

    Args:
        predictor: of the head "moments" or "sampling"; of the linearised one drawn weights are exported, with a
            warning.
        inputs: an example of the model's positional arguments, of at least two samples.
        dynamic_batch: let the exported program take any number of samples.

    Raises:
        PosthocUQError: the inputs are no tensors, or the model cannot be run on them.
    """
    _check_inputs(inputs)
    module = _exportable(predictor, stacklevel=4)
    shapes: Any = None
    if dynamic_batch:
        batch = torch.export.Dim("batch", min=1, max=2**16)
        shapes = (tuple({0: batch} for _ in inputs),)
    with torch.no_grad():
        with predictor.explaining(Batch(inputs)):
            module(*inputs)  # what is made once and kept must be made before tracing
        return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
