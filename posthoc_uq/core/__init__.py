"""What all rooms stand on, and nothing of what the package is about. `OFFERED` says by file what others take from it.

A file's own name is the file: `steady` and `batches` are imported from theirs.
"""

from posthoc_uq.core.registry import names_of

OFFERED = {
    # the exceptions, and what a message says; `check_refused`: a model cannot take a shorter way
    "errors": (
        "CorruptPosteriorError NonFiniteError PosteriorMismatchError PosthocUQError UnsupportedLayerError "
        "check_refused in_one_line out_of_memory printable warn_user"
    ),
    # types of options, and the checks of their values
    "options": (
        "Count Magnitude Natural NotNegative Options Positive Seed Share Temperature Unit "
        "check_names check_option did_you_mean known_arguments made_of one_of shown"
    ),
    # plain values that a file may hold, checked by pydantic
    "records": "Name Record among validate_record",
    # loaders are read; `explained` shows a batch that a model cannot be run on
    "batches": (
        "Bar Batch BatchReader as_targets batches_of_call check_loader check_reusable count_samples explained "
        "holds_samples known_length"
    ),
    # which part of what a model returns its outputs are
    "outputs": "Output OutputChoice checked_output chosen_in guessed_choice joined_targets output_tensor with_choice",
    # copies on the same memory, and what is asked of a model
    "model": "jvp model_device replicate untied unwrap with_plain_weights with_separate_embedding_weight",
    # numbers keyed by a sample's bytes
    "randomness": "device_generators isolated_random_state mix mixed_seed mixed_seeds sample_keys share_of uniforms",
    # in the precision that they need
    "numerics": "all_finite cholesky eigh_descending nystrom",
    # number types of devices, checks of values that the host must see, memory budgets
    "devices": "DeferredChecks full_precision has_double host_double on_host widest_dtype",
    "distributed": "all_reduce_sum gather on_all_ranks own_samples rank sampler_of world",
    # bars, and which share of a long computation is done
    "progress": "Progress bars_shown count_progress progress_span report_progress split_progress",
    # a signal that raises, as Ctrl-C, ends a call where nothing is half done
    "interrupts": "defer_interrupts",
    # things by name, some imported when they are asked for
    "registry": "Registry",
    # text tables and cells of a CSV
    "tables": "cell_text csv_text text_table",
}
"""By file, the names that other rooms and tests take."""

__getattr__ = names_of(__name__, OFFERED)
