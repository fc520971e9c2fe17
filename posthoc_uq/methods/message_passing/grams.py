"""A last layer's independent weights, with the correlations of their inputs: for means, for new data, and for data that
go out.

Independent variances do not know what the old data say of combinations of weights: by them alone, later data would
move the means too far in some directions, and too little in others. The Gram ``G`` of the layer's inputs, which the
posterior keeps, knows. For output j the old data count as a Gaussian of the precision ``c_j G`` around
the mean ``m_j`` of the posterior, beside the prior ``P_0``. For a regression ``c_j`` is the noise precision, so that
means are exact. For classes the sites of the old targets are gone, and ``c_j`` is `SHARPER` times what the messages say
of a feature, relative to its Gram, on average.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.core.devices import as_double
from posthoc_uq.core.errors import NonFiniteError, PosthocUQError
from posthoc_uq.core.numerics import cholesky
from posthoc_uq.layers.layer import Layer
from posthoc_uq.methods.message_passing import joint
from posthoc_uq.methods.message_passing.data import Examples, Units
from posthoc_uq.methods.message_passing.gaussian import Message
from posthoc_uq.methods.message_passing.targets import Regression, Signal
from posthoc_uq.posteriors.block import NotContainedError
from posthoc_uq.posteriors.laplace import LARGEST_BYTES
from posthoc_uq.posteriors.messages import MessagesBlock

SHARPER = 3.0
"""Messages to single weights say less than the sites of all targets do. Of 1, 2 and 4, both 2 and 4 predicted best
after updates and forgetting, on four networks of digits with two sizes of data each."""

_ROWS = 4096  # at once
_LARGEST_GRAM = LARGEST_BYTES // 2  # with a larger one, `kept_gram` refuses any number of outputs
_TOLERANCE = 1e-4  # of the sites of new targets, which the approximation does not need better


def gram_of(inputs: Tensor, shift: Tensor, bias: bool) -> Tensor | None:
    """The Gram ``(n, n)`` in float64 of a last layer's inputs ``(N, I)``, with `shift` ``(I,)`` taken from them where
    the layer has a bias, whose 1 is the last; None where it would be larger than 2 GiB.
    """
    size = inputs.shape[1] + bias
    if 8 * size**2 > _LARGEST_GRAM:
        return None
    gram = shift.new_zeros(size, size)
    for part in inputs.split(_ROWS):
        rows = as_double(part) - shift if bias else as_double(part)
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1) if bias else rows
        gram.addmm_(rows.T, rows)
    return (gram + gram.T) / 2


def in_units(gram: Tensor, units: Units) -> Tensor:
    """A Gram by `gram_of` as that of inputs in these units, which have the same shift."""
    spread = torch.ones_like(gram[0])
    spread[: len(units.spread)] = units.spread
    return gram / torch.outer(spread, spread)


def settled_means(
    prior: tuple[Tensor, Tensor],
    gram: Tensor,
    rows: Tensor,
    targets: Tensor,
    told: Message,
    signal: Regression,
) -> Message:
    """The messages of a regression to independent weights, with the means to which they converge: those of the exact
    posterior, ``(diag P + X^T X / s^2)^-1 (P mu + X^T y / s^2)``, which takes many epochs where inputs correlate.

    Args:
        prior: means and precisions ``(J, n)``.
        gram: ``X^T X``, ``(n, n)``.
        rows: ``X``, ``(N, n)``, with the bias's 1.
        targets: ``(N, J)``.
        told: the messages, ``(J, n)``.
        signal: of the targets.
    """
    noise = torch.as_tensor(signal.noise_variance, dtype=rows.dtype, device=rows.device).expand(
        targets.shape[1]
    )
    pulls, means = targets.T @ rows, list[Tensor]()
    for mean, precision, variance, pull in zip(*prior, noise, pulls, strict=True):
        system = torch.diag(precision) + gram / variance
        field = (precision * mean + pull / variance).unsqueeze(1)
        means.append(torch.cholesky_solve(field, cholesky(system)).squeeze(1))
    return Message(torch.stack(means) * (prior[1] + told.rho) - prior[1] * prior[0], told.rho)


def kept_gram(block: MessagesBlock, layer: Layer) -> Tensor:
    """The Gram of a block's data.

    Raises:
        PosthocUQError: the block does not know it, or a change would take too much memory.
    """
    size = 16 * layer.outputs * layer.inputs**2
    if block.gram is None or size > LARGEST_BYTES:
        raise PosthocUQError(
            f"Data come in and go out of '{layer.name}' by one matrix an output, which takes {size / 2**30:.1f} GiB "
            f"({layer.outputs} outputs, {layer.inputs} inputs), more than {LARGEST_BYTES / 2**30:.0f}; fit again on "
            f"the data that the posterior is to hold."
        )
    return as_double(block.gram)


def units_of(gram: Tensor, samples: int, shift: Tensor, examples: Examples, bias: bool) -> Units:
    """Units in which the old data's inputs have the size 1, and the targets that of the new data."""
    own = Units.of(examples, bias, shift)
    squares = gram.diagonal()[: len(shift)] / samples
    floor = 1e-6 * squares.mean().clamp(min=1e-30)
    return Units(own.shift, squares.clamp(min=floor).sqrt(), own.value_shift, own.value_spread)


class Remembered:
    """The old data of independent weights, in the units of `units_of`.

    Attributes:
        prior: precisions ``(J, n)``.
        known: the posterior's means and precisions, ``(J, n)``.
        gram: ``(n, n)``.
        active: which inputs are not always 0, ``(n,)``.
        rate: c, ``(J,)``.
        said: the precision that messages gave a weight, relative to the sum of squares of its input, ``(J, n)``.
    """

    def __init__(self, prior: Tensor, known: Message, gram: Tensor, signal: Signal) -> None:
        self.prior, self.known, self.gram = prior, known, gram
        told, squares = known.rho - prior, gram.diagonal()
        usual = told.sum(1) / squares.sum()
        # an input that is always 0, but for rounding, says nothing of its weight
        self.active = squares > 1e-6 * squares.mean()
        self.said = torch.where(self.active, told / squares, usual.unsqueeze(1))
        self.rate = SHARPER * usual
        if isinstance(signal, Regression):
            noise = torch.as_tensor(signal.noise_variance, dtype=gram.dtype, device=gram.device)
            self.rate = noise.reciprocal().expand(len(prior))

    def posterior(self, gram: Tensor) -> joint.Joint:
        """With the correlations of data of this Gram, around the known means."""
        precision = torch.diag_embed(self.prior) + self.rate.reshape(-1, 1, 1) * gram
        return joint.Joint((precision @ self.known.mean.unsqueeze(2)).squeeze(2), precision)

    def with_data(self, rows: Tensor, own: Tensor, targets: Tensor, signal: Signal) -> tuple[Tensor, Tensor]:
        """Means and precisions ``(J, n)`` when these come in.

        Args:
            rows: ``(N, n)``, with the bias's 1.
            own: their Gram, ``(n, n)``.
            targets: as `signal` takes them.
            signal: of the targets.
        """
        before = self.posterior(self.gram)
        _, told = joint.fit_sites(rows, targets, signal, before, tolerance=_TOLERANCE)
        mean, _ = joint.plus(before, told).moments()
        return mean, self.known.rho + self.said * own.diagonal()

    def without(self, rows: Tensor, own: Tensor, targets: Tensor, signal: Signal) -> tuple[Tensor, Tensor]:
        """Means and precisions ``(J, n)`` when these go out: the sites under which the posterior is settled no longer
        pull at the means.

        Args: as `with_data`.

        Raises:
            NotContainedError: what would be left has a precision that is not positive.
        """
        sites = joint.sites_within(rows, targets, signal, self.posterior(self.gram))
        pull = (sites.tau - sites.rho * (rows @ self.known.mean.T)).T @ rows
        squares = self.gram.diagonal()
        share = own.diagonal() / squares.clamp(min=torch.finfo(squares.dtype).tiny)
        if bool((share[self.active] > 1 + 1e-3).any()):
            raise NotContainedError("sum of squares of an input of the layer")
        left = self.posterior(self.gram - own)
        try:
            step, _ = joint.Joint(pull, left.precision).moments()
        except NonFiniteError:
            raise NotContainedError("precision of a combination of weights") from None
        told = (self.known.rho - self.prior) * (1 - share.clamp(max=1.0))
        return self.known.mean - step, self.prior + told
