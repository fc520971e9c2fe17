"""Posteriors that are trained, one file a method, with their blocks and the loop that all share.

Nothing of it is imported before it is asked for: `posthoc_uq.methods` and `posthoc_uq.posteriors` have its names.
`OFFERED` says by file what a training of your own, and a look into one of these, takes.
"""

from posthoc_uq.core.registry import names_of

OFFERED = {
    # what a method that optimises is made of
    "training": "Group Objective Step Training check_trainable",
    "mean_field": "MeanField",
    # what trainings store
    "variational": "Flow LatentBinaryBlock MedianBlock RandomScale",
    "messages": "JointMessagesBlock MessagesBlock",
    # their divergence from a prior over functions
    "function_kl": "function_space_kl",
    # message passing, step by step
    "message_passing.messages": (
        "Argmax Message Regression Signal Softargmax divide from_moments multiply uniform_like"
    ),
    "message_passing.network": "Activation Weighted outputs_of",
    "message_passing.train": "Trainer drawn_means weight_variance",
}
"""By file, the names that other programs take."""

__getattr__ = names_of(__name__, OFFERED)
