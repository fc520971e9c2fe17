"""A tensor that carries a mean and a variance through unchanged model code, and the pass that dispatches it.

Every torch function with a `MomentTensor` among its arguments goes to a rule (Schodt 2024, section 4, carries the same
two moments). A function without a rule follows the policy of the pass; no variance is lost silently.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.layers.calls import CallMode
from posthoc_uq.layers.rules import AffineCall, affine_call
from posthoc_uq.moments.unscented import KAPPA, MeanAndVariance

Relu = Literal["unscented", "exact"]
MaxPool = Literal["clark", "argmax"]
Covariances = Literal["diag", "full"]
Unknown = Literal["error", "unscented"]


class WeightPosterior(Protocol):
    """The posterior of one layer's weights, as the affine rules need it.

    Attributes:
        layer: its name.
        row: whether correlations inside a row of the weight matrix are kept.
        variances: marginal variances, in the weight's shape, outputs first.
        bias_variances: of the bias, or None.
        summed: ``W o W + S`` (W the means, S the variances), by which the input's variance is multiplied; of a
            convolution without groups ``[W o W + S, S]`` along its input channels.
    """

    layer: str
    row: bool
    variances: Tensor
    bias_variances: Tensor | None
    summed: Tensor

    def row_variance(self, mean: Tensor, variance: Tensor | None) -> Tensor:
        """Variance by the weights alone of ``W x + b``, ``(rows, outputs)``, for inputs ``(rows, inputs)``."""
        ...

    def covariance(self, mean: Tensor, covariance: Tensor | None) -> Tensor:
        """Covariance by the weights alone, ``(rows, outputs, outputs)``, for inputs of covariance ``(rows, inputs,
        inputs)``, or without one.
        """
        ...


@dataclass(frozen=True)
class Rules:
    """Options of the rules.

    Attributes:
        relu: ``"unscented"``, or ``"exact"`` for the closed form of ReLU and LeakyReLU.
        max_pool: ``"clark"``, or ``"argmax"``: the variance of the largest mean.
        pool_rho: correlation assumed between the cells that an average runs over, in [0, 1].
        cov: ``"diag"``, or ``"full"``: covariances through linear and element-wise layers.
        unknown: what happens to a function without a rule: ``"error"``, or ``"unscented"``, the unscented rule along
            random directions of its inputs.
        kappa: of the points of functions of one entry, see `moments.unscented`; or by layer, for the functions after
            it, with 2 for others.
    """

    relu: Relu = "unscented"
    max_pool: MaxPool = "clark"
    pool_rho: float = 0.0
    cov: Covariances = "diag"
    unknown: Unknown = "error"
    kappa: float | Mapping[str, float | Tensor] = KAPPA


class MomentTensor(Tensor):
    """Mean and variance of every entry of a tensor; only rules make and read it.

    The tensor itself holds no numbers: an operation that no rule sees fails instead of losing variance.

    Attributes:
        moment_mean: the means.
        moment_variance: the variances, of the same shape; in float32 at least.
        moment_covariance: ``(batch, n, n)`` beside a mean ``(batch, n)``, or None.
        moment_note: what a rule leaves for a later rule, or None.
        moment_aliases: weak references to all tensors that share its memory, itself included, in one list for all of
            them; None where it has no views.
    """

    moment_mean: Tensor
    moment_variance: Tensor
    moment_covariance: Tensor | None
    moment_note: Any
    moment_aliases: list[weakref.ref[MomentTensor]] | None

    @staticmethod
    def __new__(
        cls: type[MomentTensor], mean: Tensor, variance: Tensor, covariance: Tensor | None = None
    ) -> MomentTensor:
        kind = variance_dtype(mean.dtype)
        variance = variance if variance.dtype == kind else variance.to(kind)
        made = Tensor._make_wrapper_subclass(cls, mean.shape, dtype=mean.dtype, device=mean.device)  # type: ignore[attr-defined]
        made.moment_mean, made.moment_variance, made.moment_covariance = mean, variance, covariance
        made.moment_note, made.moment_aliases = None, None
        return made

    def __init__(self, mean: Tensor, variance: Tensor, covariance: Tensor | None = None) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"MomentTensor(shape={tuple(self.moment_mean.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PosthocUQError(
            f"{function_name(func)} was called on a tensor with moments outside the pass that made it; a model must "
            f"not keep activations between calls."
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PosthocUQError(
            f"{func} met a tensor with moments below torch's Python functions; it has no rule."
        )


class SumOf(NamedTuple):
    """What is known of a sum: of which tensor it is.

    Attributes:
        source: that tensor.
        total: gives the same sum of a tensor of its shape.
    """

    source: MomentTensor
    total: Callable[[Tensor], Tensor]


DETACHED = "detached"
"""The note of numbers that the model's code detached. A maximum of them keeps an exponential from overflowing, and
cancels: it counts as certain."""

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
QUERIES: set[Any] = set()
COMPARISONS: set[Any] = set()
# A model of transformers that is given its labels computes one of these beside its logits.
LOSSES = {F.cross_entropy, F.binary_cross_entropy_with_logits, F.mse_loss}


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register ``rule(pass, *args, **kwargs)`` for torch functions; its parameters have their public names."""

    def register(implementation: Rule) -> Rule:
        for function in functions:
            RULES[function] = implementation
        return implementation

    return register


def named(*names: str, places: Sequence[Any] = (torch, F, Tensor)) -> list[Any]:
    """The torch functions and methods of these names, wherever they exist in this version."""
    return [
        getattr(place, name) for name in names for place in places if callable(getattr(place, name, None))
    ]


def function_name(func: Any) -> str:
    """A function's name as in torch's documentation, as far as it is known."""
    return resolve_name(func) or getattr(func, "__name__", repr(func))


def moments_of(value: Any) -> MeanAndVariance:
    """Mean and variance of a tensor or number; variance 0 for anything but a `MomentTensor`."""
    if isinstance(value, MomentTensor):
        return value.moment_mean, value.moment_variance
    # A number in float64: a tensor without dimensions does not change the other operand's precision.
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64, device="cpu")
    return tensor, torch.zeros((), dtype=variance_dtype(tensor.dtype), device=tensor.device).expand(
        tensor.shape
    )


def mean_of(value: Any) -> Any:
    """The mean in place of every moment tensor, in lists, tuples and dictionaries too; anything else as it is."""
    return _mapped(value, lambda x: x.moment_mean)


def variance_of(value: Any) -> Any:
    """The variance in place of every moment tensor, anything else as it is."""
    return _mapped(value, lambda x: x.moment_variance)


def _mapped(value: Any, take: Callable[[MomentTensor], Tensor]) -> Any:
    return pytree.tree_map(lambda leaf: take(leaf) if isinstance(leaf, MomentTensor) else leaf, value)


def variance_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of variances: at least float32, since squares of small numbers underflow below it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rewrapped(mean: Any, variance: Any) -> Any:
    """A tensor, or the tensors of a list or tuple, with their variances."""
    return pytree.tree_map(MomentTensor, mean, variance)


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast, for arithmetic of variances."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


class Pass(CallMode):
    """One run of a model on tensors with moments; a context that lasts as long as the model runs.

    Args:
        rules: choices between forms of rules.
        posteriors: of the layers' weights, by the identity of the weight that the model's code uses.
        where: gives the name of the module that is running, for messages.
        unproved: those of the weights of which it is not known that linear layers are their only use.

    Attributes:
        used: the names of the layers whose weights were used.
        elsewhere: the unproved weights that were used otherwise than once by a linear layer, by their identities.
    """

    def __init__(
        self,
        rules: Rules,
        posteriors: Mapping[int, WeightPosterior],
        where: Callable[[], str] = lambda: "",
        unproved: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.rules, self.posteriors, self.where = rules, posteriors, where
        self.used, self.elsewhere = set[str](), set[int]()
        self._unproved, self._linear = unproved, set[int]()
        self._last = ""  # of the layers whose weights were used
        self._written: dict[int, tuple[Tensor, MomentTensor]] = {}  # plain tensors that became uncertain

    def _present(self, value: Any) -> Any:
        """What stands for a tensor now."""
        if not isinstance(value, Tensor) or isinstance(value, MomentTensor):
            return value
        base: Any = value._base  # pyright: ignore[reportPrivateUsage]
        if id(base) in self._written:
            raise self.refusal(
                "a view of a plain tensor is used after an uncertain activation was written into that in place",
                "take the view afterwards",
            )
        return self._written[id(value)][1] if id(value) in self._written else value

    @property
    def kappa(self) -> float | Tensor:
        """That of the uncertain layer that ran last, where the rules have one by layer."""
        kappa = self.rules.kappa
        return kappa.get(self._last, KAPPA) if isinstance(kappa, Mapping) else kappa

    def follows(self, weight: Tensor) -> bool:
        return id(weight) in self.posteriors

    def handle_call(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._written:
            args, kwargs = pytree.tree_map(self._present, (args, kwargs))
            if any(isinstance(x, MomentTensor) for x in pytree.tree_leaves((args, kwargs))):
                types = (*types, MomentTensor)
        call = affine_call(func, args, kwargs)
        if self._unproved and func not in QUERIES:
            self._note_uses(call, args, kwargs)
        if call is not None and id(call.parameter) in self.posteriors:
            self._last = self.posteriors[id(call.parameter)].layer
            self.used.add(self._last)
            return RULES[AffineCall](self, call)
        if not any(issubclass(kind, MomentTensor) for kind in types):
            return func(*args, **kwargs)
        if kwargs.get("out") is not None:
            raise self.refusal(f"{function_name(func)} writes into out=", "use its result")
        implementation = RULES.get(func)
        if implementation is not None:
            return implementation(self, *args, **kwargs)
        if call is not None:  # a layer without a posterior
            return RULES[AffineCall](self, call)
        others = (*args[1:], *kwargs.values())
        if func in QUERIES and func not in COMPARISONS and any(isinstance(x, MomentTensor) for x in others):
            raise self.refusal(
                f"{function_name(func)} takes an activation as a certain number", "do it otherwise"
            )
        if func in QUERIES or getattr(func, "__name__", "") == "__get__":
            answer = func(*mean_of(args), **mean_of(kwargs))
            if func in QUERIES or not isinstance(answer, Tensor):
                return answer
        if func in LOSSES:
            loss = func(*mean_of(args), **mean_of(kwargs))
            if loss.ndim == 0:  # one number for the batch, which no prediction reads; others are outputs
                return loss
        return self.unknown(func, args, kwargs)

    def _note_uses(self, call: AffineCall | None, args: Any, kwargs: Any) -> None:
        for leaf in pytree.tree_leaves((args, kwargs)):
            key = id(leaf)
            if key in self._unproved:
                linear = call is not None and call.kind == "linear" and call.weight is leaf
                if not linear or key in self._linear:
                    self.elsewhere.add(key)
                self._linear.add(key)

    def unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function without a rule, by the policy of the pass."""
        if self.rules.unknown == "unscented":
            return along_directions(func, args, kwargs, self.kappa)
        raise self.refusal(
            f"no rule carries mean and variance through {function_name(func)}",
            "pass unknown='unscented' (its values at points around the mean)",
        )

    def refusal(self, problem: str, remedy: str) -> PosthocUQError:
        """The error to raise: where in the model, what is wrong, and what to do."""
        where = self.where()
        if where:
            problem = f"in module '{where}' {problem}"
        if "." not in problem.split()[0]:  # the name of a function keeps its letters
            problem = problem[0].upper() + problem[1:]
        return PosthocUQError(f"{problem}; {remedy}, or predict with head='sampling'.")

    def replace(self, target: Tensor, result: MomentTensor) -> MomentTensor:
        """Write the result of an in-place operation into its target; returns the target, or of a plain tensor what
        stands for it from then on.

        Raises:
            PosthocUQError: the target shares its memory with another tensor that is still in use, or may do.
        """
        if not isinstance(target, MomentTensor):
            if target._base is not None or isinstance(target, nn.Parameter):  # pyright: ignore[reportPrivateUsage]
                raise self.refusal(
                    "an uncertain activation is written in place into a view of a plain tensor",
                    "make the operation out of place",
                )
            self._written[id(target)] = target, result
            return result
        alive = [alias() for alias in target.moment_aliases or []]
        if any(alias is not None and alias is not target for alias in alive):
            raise self.refusal(
                "an operation in place changes a view of a tensor that is still in use",
                "make it out of place",
            )
        target.moment_mean, target.moment_variance = result.moment_mean, result.moment_variance
        target.moment_covariance, target.moment_note = result.moment_covariance, result.moment_note
        return target


def as_view(base: Any, view: Any) -> Any:
    """Record that a view (or each of several) shares memory with `base` and with all other views of it."""
    if isinstance(base, MomentTensor):
        if base.moment_aliases is None:
            base.moment_aliases = [weakref.ref(base)]
        for part in cast(Sequence[Any], view) if isinstance(view, (tuple, list)) else (view,):
            if isinstance(part, MomentTensor) and part is not base:
                base.moment_aliases.append(weakref.ref(part))
                part.moment_aliases = base.moment_aliases
    return view


DIRECTIONS = 32  # of the inputs, along which a function without a rule is taken


def along_directions(func: Any, args: Any, kwargs: Any, kappa: float | Tensor = KAPPA) -> Any:
    """Mean and variance of the function's outputs by the three points of the unscented rule along each of `DIRECTIONS`
    random directions, the same in every call, in which every input moves up or down in units of its deviation.

    Of an element-wise function that is the unscented rule itself. Of several inputs, a variance has a relative error of
    about ``sqrt(2 / DIRECTIONS)``.
    """
    name = getattr(func, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__"):
        raise PosthocUQError(
            f"{function_name(func)} works in place and has no rule, so that its variance would be lost; use the form "
            f"that returns a new tensor, or predict with head='sampling'."
        )
    inputs, build = _inputs(args, kwargs)
    reach = kappa + 1

    def at(steps: list[Tensor] | None, sign: float) -> tuple[list[Tensor], Any]:
        means = [x.moment_mean for x in inputs]
        moved = (
            means if steps is None else [mean + sign * step for mean, step in zip(means, steps, strict=True)]
        )
        moved_args, moved_kwargs = build(moved)
        leaves, spec = pytree.tree_flatten(func(*moved_args, **moved_kwargs))
        return [_checked(func, leaf) for leaf in leaves], spec

    centres, spec = at(None, 0.0)
    bends, squares = [0.0 * centre for centre in centres], [0.0 * centre for centre in centres]
    generator = torch.Generator().manual_seed(0)
    for _ in range(DIRECTIONS):
        steps: list[Tensor] = []
        for x in inputs:
            # all samples get the same signs, so that none depends on its place in the batch
            signs = (
                torch.randint(0, 2, x.moment_mean.shape[1:], generator=generator, device="cpu") * 2.0 - 1.0
            )
            deviation = x.moment_variance.sqrt()
            steps.append((reach**0.5 * signs.to(deviation) * deviation).to(x.moment_mean))
        (ups, _), (downs, _) = at(steps, 1.0), at(steps, -1.0)
        for place, (centre, up, down) in enumerate(zip(centres, ups, downs, strict=True)):
            bend = up + down - 2.0 * centre
            bends[place] = bends[place] + bend / DIRECTIONS
            bent = kappa * bend.square() / (4 * reach**2)
            squares[place] = squares[place] + ((up - down).square() / (4 * reach) + bent) / DIRECTIONS
    parts = [
        MomentTensor(centre + bend / (2 * reach), square.to(variance_dtype(centre.dtype)))
        for centre, bend, square in zip(centres, bends, squares, strict=True)
    ]
    return pytree.tree_unflatten(parts, spec)


def _inputs(args: Any, kwargs: Any) -> tuple[list[MomentTensor], Callable[[list[Tensor]], tuple[Any, Any]]]:
    """The moment tensors among the arguments, and a function that puts plain tensors in their places."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, MomentTensor)]

    def build(values: list[Tensor]) -> tuple[Any, Any]:
        filled = list(leaves)
        for position, value in zip(positions, values, strict=True):
            filled[position] = value
        return cast(tuple[Any, Any], pytree.tree_unflatten(filled, spec))

    return [leaves[position] for position in positions], build


def _checked(func: Any, output: Any) -> Tensor:
    """An output, if it can have a variance."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        kind = str(output.dtype) if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise PosthocUQError(
            f"{function_name(func)} makes {kind} of an uncertain activation, which has no variance; keep it out of the "
            f"model's forward pass, or predict with head='sampling'."
        )
    return output
