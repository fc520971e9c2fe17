"""What a posterior's blocks can do, by name: heads and searches ask for that, never for a method.

All blocks can draw. The other capabilities belong to posteriors that lie around a mean, as Gaussians do.
"""

from __future__ import annotations

from collections.abc import Collection

from posthoc_uq.errors import PosthocUQError

DRAWS = "draws"
SYMMETRY = "symmetric draws"  # mean - deviation is as likely as mean + deviation
VARIANCES = "variances"  # of every weight
QUADRATIC = "quadratic forms"  # J Sigma J^T of Jacobians
ROWS = "row covariances"  # for the variance that a layer's weights give to its outputs
LOG_DETERMINANT = "a log-determinant"  # of the precision
INDEPENDENT = "moments of independent weights"  # once what they have in common is drawn
FORM = "a covariance form"  # contracts Jacobians without forming them


def required(
    needs: Collection[str], known: Collection[str], method: str, what: str, way_out: str = ""
) -> None:
    """Refuse what the blocks of a posterior cannot do.

    Args:
        needs: names of capabilities.
        known: capabilities of the posterior.
        method: the posterior's.
        what: the request that needs them, as the subject of a sentence.
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
