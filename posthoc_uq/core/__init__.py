"""What all rooms stand on, and nothing of what the package is about.

| file | what other rooms take from it |
| --- | --- |
| `errors` | the exceptions, `warn_user`, `out_of_memory`; `check_refused`: a model cannot take a shorter way |
| `options` | types of options (`Count`, `Positive`, ...), `Options`, `check_option`, `check_names`, `did_you_mean` |
| `records` | `Record`: plain values that a file may hold, checked by pydantic |
| `batches` | `BatchReader` and `batches` read loaders; `explained` shows a `Batch` that a model cannot be run on |
| `outputs` | `Choice`: which part of what a model returns its outputs are |
| `model` | `replicate`: copies on the same memory; `untied`, `with_separate_embedding_weight`, `jvp` |
| `randomness` | numbers keyed by a sample's bytes, `isolated_random_state` |
| `numerics` | eigenvectors, Cholesky factors and sketches, in the precision that they need |
| `devices` | number types of devices, `DeferredChecks` for values the host must see, memory budgets |
| `distributed` | `run_on_all_ranks`, `all_reduce_sum`, `broadcast`, `gather` |
| `progress` | bars, and which share of a long computation is done |
| `interrupts` | `defer_interrupts`: a signal that raises, as Ctrl-C, ends a call where nothing is half done |
| `steady` | weights that change while a call reads them are noticed |
| `registry` | things by name, some imported when they are asked for |
| `tables` | text tables and cells of a CSV |
"""
