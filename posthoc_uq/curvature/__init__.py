"""What the data say about the weights. `OFFERED` says by file what others take from it."""

from posthoc_uq.core.registry import names_of

OFFERED = {
    # what a sweep sums
    "statistics": "Accumulator GradientFactors GradientGram InputGram RangeSketch RotatedColumns "
    "SketchedGradientFactors SketchedGradientGram SquaredGradients",
    # one pass over the data, and how its batches are told from others
    "sweep": "DataHash batch_hash",
    "labels": "own_samples_of resolve_fisher samples_in_all",
    "kept_inputs": "KeptInputs",
    "features": "FeatureSource find_features",
    "tangent_kernel": "untrained with_state",
}
"""By file, the names that other rooms and tests take."""

__getattr__ = names_of(__name__, OFFERED)
