"""Context points: inputs at which variational inference over functions is to stay uncertain.

A context is a distribution over inputs. All its randomness comes from the generator that it is given, so a draw depends
on the seed and the step alone, and nothing is remembered between steps.
"""

from posthoc_uq.contexts.base import Context
from posthoc_uq.contexts.corrupted import Corrupted
from posthoc_uq.contexts.from_data import Monochrome, Pool, TrainingBatch
from posthoc_uq.contexts.generated import Callback, UniformBox
from posthoc_uq.contexts.mixture import Mixture

__all__ = [
    "Callback",
    "Context",
    "Corrupted",
    "Mixture",
    "Monochrome",
    "Pool",
    "TrainingBatch",
    "UniformBox",
]

# Users import these classes from here, and checkpoints hold their names with this module.
for _public in (Callback, Context, Corrupted, Mixture, Monochrome, Pool, TrainingBatch, UniformBox):
    _public.__module__ = __name__


def __dir__() -> list[str]:
    return sorted(__all__)
