"""Held-out rows that the network was trained on: they are predicted far better than leave-one-out says of new ones.

The bounds were chosen on 147 perceptrons of tables, of three seeds: with parts of their test rows a warning comes in
at most one of 200 draws of a network, and of nearly all in none.
"""

from __future__ import annotations

from posthoc_uq.core.errors import warn_user
from posthoc_uq.likelihoods.conformal import ConformalScores
from posthoc_uq.likelihoods.selective import binomial_p_value
from posthoc_uq.posteriors.posterior import Posterior

_NOISE_SHARE = 0.15  # of leave-one-out's noise; test rows have .66 to 2.4 of it
_LEAST_ROWS = 30  # fewer have a mean squared error below that by chance
_ERROR_SHARE = 1 / 3  # of leave-one-out's errors: the kernel has up to 2.7 times the network's
_RISK = 0.01


def warn_of_little_noise(posterior: Posterior, rows: int) -> None:
    """Warn where held-out rows gave a regression a noise that is implausible for new ones.

    Args:
        posterior: tuned by them.
        rows: how many there were.
    """
    left_out, found = posterior.history.left_out, posterior.history.leave_one_out
    if left_out is None or found is None or found.noise_scale is None or rows < _LEAST_ROWS:
        return
    share = posterior.noise_scale / left_out.noise_scale
    if share < _NOISE_SHARE:
        _warn(f"have {share:.2g} times the noise that leave-one-out found for new rows")


def warn_of_few_errors(posterior: Posterior, promises: ConformalScores) -> None:
    """Warn where so few of the promising rows are predicted wrong as is implausible for new ones."""
    found = posterior.history.leave_one_out
    if found is None or found.accuracy in (None, 1.0) or not promises.wrong:
        return
    errors, rows = int(next(iter(promises.wrong.values()))[-1]), promises.samples
    if binomial_p_value(errors, rows, _ERROR_SHARE * (1 - found.accuracy)) < _RISK:
        right = f"{1 - errors / rows:.1%} of {rows:,}"
        _warn(f"are predicted right in {right}, where leave-one-out found {found.accuracy:.1%} for new rows")


def _warn(what: str) -> None:
    warn_user(
        f"The held-out rows {what}: was the network trained on them? Then nothing that they promise holds for others; "
        f"give rows that it has not seen."
    )
