"""Context points: inputs at which a method in function space says what it does *not* know.

A context is a distribution over inputs. Everything that it draws comes from the generator it is given, so that a draw
is a function of a seed and a step alone, and nothing is remembered between steps.
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

# Users import these classes from here, and checkpoints know them by this name.
for _public in (Callback, Context, Corrupted, Mixture, Monochrome, Pool, TrainingBatch, UniformBox):
    _public.__module__ = __name__


def __dir__() -> list[str]:
    return sorted(__all__)
