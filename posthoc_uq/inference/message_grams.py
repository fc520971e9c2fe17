"""New data for a last layer's independent weights, and data that go out: with the correlations of the old data.

Independent variances do not know what the old data say of combinations of weights: by them alone, later data would
move the means too far in some directions, and too little in others. The Gram ``G`` of the layer's inputs, which a
posterior keeps for its novelty, knows. For output j the old data count as a Gaussian of the precision ``c_j G`` around
the mean ``m_j`` of the posterior, beside the prior ``P_0``. For a regression ``c_j`` is the noise precision, so that
means are exact. For classes the sites of the old targets are gone, and ``c_j`` is `SHARPER` times what the messages say
of a feature, relative to its Gram, on average.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posthoc_uq.curvature.kept_grams import total
from posthoc_uq.errors import NonFiniteError, PosthocUQError
from posthoc_uq.inference.message_data import Examples, Units
from posthoc_uq.layers import Layer
from posthoc_uq.message_passing import joint
from posthoc_uq.message_passing.gaussian import Message
from posthoc_uq.message_passing.targets import Regression, Signal
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.combining import NotContainedError
from posthoc_uq.posteriors.dense import LARGEST_BYTES

SHARPER = 3.0
"""Messages to single weights say less than the sites of all targets do. Of 1, 2 and 4, both 2 and 4 predicted best
after updates and forgetting, on four networks of digits with two sizes of data each."""

_TOLERANCE = 1e-4  # of the sites of new targets, which the approximation does not need better


def moved_gram(posterior: Posterior, layer: Layer, shift: Tensor) -> Tensor:
    """The Gram ``(n, n)`` of the layer's inputs over the old data. Where the layer has a bias, `shift` ``(I,)`` is
    taken from them, and the bias's 1 is the last.

    Raises:
        PosthocUQError: the posterior does not know it, or it would take too much memory.
    """
    size = 16 * layer.outputs * layer.inputs**2
    if size > LARGEST_BYTES:
        raise PosthocUQError(
            f"Data come in and go out of '{layer.name}' by one matrix an output, which takes {size / 2**30:.1f} GiB "
            f"({layer.outputs} outputs, {layer.inputs} inputs), more than {LARGEST_BYTES / 2**30:.0f}; fit again on "
            f"the data that the posterior is to hold."
        )
    features = posterior.features
    if features is None or features.totals is None:
        raise PosthocUQError(
            f"This posterior keeps no statistics of the inputs of '{layer.name}', without which data can neither come "
            f"in nor go out; fit again on the data that it is to hold."
        )
    gram = total(features).to(shift)
    if layer.bias is None:
        return gram
    move = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    move[:-1, -1] = -shift
    return move @ gram @ move.T


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

    def with_data(self, rows: Tensor, targets: Tensor, signal: Signal) -> tuple[Tensor, Tensor]:
        """Means and precisions ``(J, n)`` when these come in.

        Args:
            rows: ``(N, n)``, with the bias's 1.
            targets: as `signal` takes them.
            signal: of the targets.
        """
        before = self.posterior(self.gram)
        _, told = joint.fit_sites(rows, targets, signal, before, tolerance=_TOLERANCE)
        mean, _ = joint.plus(before, told).moments()
        squares = rows.square().sum(0)
        return mean, self.known.rho + self.said * squares

    def without(self, rows: Tensor, targets: Tensor, signal: Signal) -> tuple[Tensor, Tensor]:
        """Means and precisions ``(J, n)`` when these go out: the sites under which the posterior is settled no longer
        pull at the means.

        Raises:
            NotContainedError: what would be left has a precision that is not positive.
        """
        sites = joint.sites_within(rows, targets, signal, self.posterior(self.gram))
        pull = (sites.tau - sites.rho * (rows @ self.known.mean.T)).T @ rows
        gone = rows.T @ rows
        squares = self.gram.diagonal()
        share = gone.diagonal() / squares.clamp(min=torch.finfo(squares.dtype).tiny)
        if bool((share[self.active] > 1 + 1e-3).any()):
            raise NotContainedError("sum of squares of an input of the layer")
        left = self.posterior(self.gram - gone)
        try:
            step, _ = joint.Joint(pull, left.precision).moments()
        except NonFiniteError:
            raise NotContainedError("precision of a combination of weights") from None
        told = (self.known.rho - self.prior) * (1 - share.clamp(max=1.0))
        return self.known.mean - step, self.prior + told
