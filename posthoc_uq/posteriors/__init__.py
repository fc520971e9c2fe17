"""The posterior over a model's weights: blocks, their covariances, hyperparameters, what it remembers.

All files of blocks are imported here, so that every kind is registered before a posterior is read or made.
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
    Settings,
    Size,
    Stored,
    TensorSpec,
)
from posthoc_uq.posteriors.covariance import Covariance
from posthoc_uq.posteriors.features import FeatureGrams
from posthoc_uq.posteriors.information import InformationBlock
from posthoc_uq.posteriors.laplace import (
    DenseBlock,
    DiagonalBlock,
    EigenvalueCorrectedBlock,
    KroneckerBlock,
    SubnetworkBlock,
)
from posthoc_uq.posteriors.messages import JointMessagesBlock, MessagesBlock
from posthoc_uq.posteriors.posterior import Posterior, WeightPrior
from posthoc_uq.posteriors.settings import ABOUT, Evidence, History, Hyperparameters, LayerPriors
from posthoc_uq.posteriors.variational import LatentBinaryBlock, MeanFieldBlock, MedianBlock

__all__ = [
    "ABOUT",
    "BLOCKS",
    "DRAWS",
    "FAMILIES",
    "GROUPS",
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
    "InformationBlock",
    "JointMessagesBlock",
    "KroneckerBlock",
    "LatentBinaryBlock",
    "LayerPriors",
    "MeanFieldBlock",
    "MedianBlock",
    "MessagesBlock",
    "Posterior",
    "Settings",
    "Size",
    "Stored",
    "SubnetworkBlock",
    "TensorSpec",
    "WeightPrior",
]
