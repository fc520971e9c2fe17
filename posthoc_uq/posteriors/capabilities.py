"""What a posterior's blocks can do, by name: heads and searches ask for that, never for a method.

Drawing is the one thing that all can do. All else is about a posterior around its mean, as a Gaussian is.
"""

from __future__ import annotations

from collections.abc import Collection

from posthoc_uq.errors import PosthocUQError

DRAWS = "draws"
SYMMETRY = "symmetric draws"  # mean - deviation is as likely as mean + deviation
VARIANCES = "variances"  # of every weight
QUADRATIC = "quadratic forms"  # J Sigma J^T of Jacobians
ROWS = "row covariances"  # what a layer's weights give to the variance of its outputs
LOG_DETERMINANT = "a log-determinant"  # of the precision
FORM = "a covariance form"  # by which Jacobians are contracted without being formed


def required(
    needs: Collection[str], known: Collection[str], method: str, what: str, way_out: str = ""
) -> None:
    """Refuse what the blocks of a posterior cannot do.

    Args:
        needs: names of capabilities.
        known: those of the posterior.
        method: the posterior's.
        what: is asked for, as the subject of a sentence.
        way_out: what to do instead, as the end of that sentence.

    Raises:
        PosthocUQError: one is missing.
    """
    missing = sorted(set(needs) - set(known))
    if missing:
        end = f"; {way_out}." if way_out else "."
        raise PosthocUQError(
            f"{what} needs {' and '.join(missing)}, which the blocks of method={method!r} do not have{end}"
        )
