"""What all rooms stand on, and nothing of what the package is about.

| file | what other rooms take from it |
| --- | --- |
| `errors` | the exceptions, `warn_user`, `out_of_memory`; `check_refused`: a model cannot take a shorter way |
| `options` | types of options (`Count`, `Positive`, ...), `Options`, `check_option`, `check_names`, `did_you_mean` |
| `records` | `Record`: plain values that a file may hold, checked by pydantic |
| `batches` | `BatchReader` and `batches` read loaders; `explained` shows a `Batch` that a model cannot be run on |
| `outputs` | `Choice`: which part of what a model returns its outputs are |
| `model` | `replicate`: copies on the same memory; `untied`, `unshared_copy`, `jvp` |
| `randomness` | numbers keyed by a sample's bytes, `isolated_random_state` |
| `numerics` | eigenvectors, Cholesky factors and sketches, in the precision that they need |
| `devices` | number types of devices, `DeferredChecks` for values the host must see, memory budgets |
| `distributed` | `run_on_all_ranks`, `all_reduce_sum`, `broadcast`, `gather` |
| `progress` | bars, and which share of a long computation is done |
| `interrupts` | `orderly`: Ctrl-C ends a call where nothing is half done |
| `paths`, `tables` | which files are read; text tables and cells of a CSV |

What most rooms need is exported here; the rest is imported from its file.
"""

from posthoc_uq.core.batches import Bar, Batch, BatchReader, check_loader
from posthoc_uq.core.devices import TEMPORARY_BYTES, DeferredChecks, as_double, host_double
from posthoc_uq.core.distributed import gather, rank, run_on_all_ranks, world
from posthoc_uq.core.errors import (
    CorruptPosteriorError,
    NonFiniteError,
    PosteriorMismatchError,
    PosthocUQError,
    UnsupportedLayerError,
    check_refused,
    out_of_memory,
    warn_user,
)
from posthoc_uq.core.model import model_device, replicate, unwrap
from posthoc_uq.core.options import (
    Count,
    Magnitude,
    Natural,
    Options,
    Positive,
    Unit,
    check_option,
    did_you_mean,
    one_of,
)
from posthoc_uq.core.outputs import output_tensor
from posthoc_uq.core.randomness import isolated_random_state, mixed_seed, sample_keys
from posthoc_uq.core.records import Record

__all__ = [
    "TEMPORARY_BYTES",
    "Bar",
    "Batch",
    "BatchReader",
    "CorruptPosteriorError",
    "Count",
    "DeferredChecks",
    "Magnitude",
    "Natural",
    "NonFiniteError",
    "Options",
    "Positive",
    "PosteriorMismatchError",
    "PosthocUQError",
    "Record",
    "Unit",
    "UnsupportedLayerError",
    "as_double",
    "check_loader",
    "check_option",
    "check_refused",
    "did_you_mean",
    "gather",
    "host_double",
    "isolated_random_state",
    "mixed_seed",
    "model_device",
    "one_of",
    "out_of_memory",
    "output_tensor",
    "rank",
    "replicate",
    "run_on_all_ranks",
    "sample_keys",
    "unwrap",
    "warn_user",
    "world",
]
