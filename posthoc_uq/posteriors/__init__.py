"""The posterior over a model's weights: blocks, their covariances, hyperparameters, what it remembers.

Every kind of block is registered here before a posterior is read or made: those of trainings by the names of their
modules, which are imported when such a block is met.
"""

from posthoc_uq.posteriors.block import (
    BLOCKS,
    DRAWS,
    FAMILIES,
    GROUPS,
    INDEPENDENT,
    INPUTS,
    LOG_DETERMINANT,
    OUTPUTS,
    QUADRATIC,
    ROWS,
    SYMMETRY,
    VARIANCES,
    WEIGHTS,
    Block,
    PrecisionSettings,
    Size,
    TensorField,
    TensorSpec,
)
from posthoc_uq.posteriors.covariance import Covariance
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.laplace import (
    DenseBlock,
    DiagonalBlock,
    EigenvalueCorrectedBlock,
    KroneckerBlock,
    MeanFieldBlock,
    SubnetworkBlock,
)
from posthoc_uq.posteriors.posterior import Posterior, WeightPrior
from posthoc_uq.posteriors.settings import HYPERPARAMETERS, Evidence, History, Hyperparameters, LayerPriors

__all__ = [
    "BLOCKS",
    "DRAWS",
    "FAMILIES",
    "GROUPS",
    "HYPERPARAMETERS",
    "INDEPENDENT",
    "INPUTS",
    "LOG_DETERMINANT",
    "OUTPUTS",
    "QUADRATIC",
    "ROWS",
    "SYMMETRY",
    "VARIANCES",
    "WEIGHTS",
    "Block",
    "Covariance",
    "DenseBlock",
    "DiagonalBlock",
    "EigenvalueCorrectedBlock",
    "Evidence",
    "FeatureGrams",
    "History",
    "Hyperparameters",
    "KroneckerBlock",
    "LayerPriors",
    "MeanFieldBlock",
    "Posterior",
    "PrecisionSettings",
    "Size",
    "SubnetworkBlock",
    "TensorField",
    "TensorSpec",
    "WeightPrior",
]

for _row in (
    ("inf", "posthoc_uq.posteriors.information", "InformationBlock"),
    ("latent_binary", "posthoc_uq.trained.variational", "LatentBinaryBlock"),
    ("median_model", "posthoc_uq.trained.variational", "MedianBlock"),
    ("messages", "posthoc_uq.trained.messages", "MessagesBlock"),
    ("joint_messages", "posthoc_uq.trained.messages", "JointMessagesBlock"),
):
    BLOCKS.later(*_row)
