"""The posterior over a model's weights: blocks, their covariances, hyperparameters, what it remembers.

Every kind of block is registered here before a posterior is read or made: those of trainings by the names of their
modules, which are imported when such a block is met.
"""

from typing import TYPE_CHECKING

from posthoc_uq.core.registry import names_of
from posthoc_uq.posteriors.block import (
    BLOCKS,
    DRAWS,
    FAMILIES,
    GIVEN,
    GROUPS,
    INDEPENDENT,
    INPUTS,
    LOG_DETERMINANT,
    OUTPUTS,
    PRECISION,
    QUADRATIC,
    ROWS,
    SYMMETRY,
    VARIANCES,
    WEIGHTS,
    Block,
    NotContainedError,
    PrecisionSettings,
    Size,
    TensorField,
    TensorSpec,
    Weights,
    packed,
)
from posthoc_uq.posteriors.covariance import Covariance, LayerRows, Mode, jacobian_gram, precise_values
from posthoc_uq.posteriors.features import ClassGrams, FeatureGrams
from posthoc_uq.posteriors.history import (
    CRITERIA,
    ChangesRecord,
    Criterion,
    FaithfulRecord,
    HeadRecord,
    History,
    LeaveOneOut,
    LeftOutRecord,
    ScaleCorrection,
)
from posthoc_uq.posteriors.laplace import (
    DenseBlock,
    DiagonalBlock,
    EigenvalueCorrectedBlock,
    KroneckerBlock,
    MeanFieldBlock,
    SubnetworkBlock,
    WideEigenvalueCorrectedBlock,
    WideKroneckerBlock,
)
from posthoc_uq.posteriors.posterior import Posterior
from posthoc_uq.posteriors.search import maximise_evidence, search_decades
from posthoc_uq.posteriors.settings import (
    HYPERPARAMETERS,
    Evidence,
    Hyperparameters,
    LayerPriors,
    WeightPrior,
)

if TYPE_CHECKING:
    from posthoc_uq.posteriors.information import InformationBlock

__all__ = [
    "BLOCKS",
    "CRITERIA",
    "DRAWS",
    "FAMILIES",
    "GIVEN",
    "GROUPS",
    "HYPERPARAMETERS",
    "INDEPENDENT",
    "INPUTS",
    "LOG_DETERMINANT",
    "OUTPUTS",
    "PRECISION",
    "QUADRATIC",
    "ROWS",
    "SYMMETRY",
    "VARIANCES",
    "WEIGHTS",
    "Block",
    "ChangesRecord",
    "ClassGrams",
    "Covariance",
    "Criterion",
    "DenseBlock",
    "DiagonalBlock",
    "EigenvalueCorrectedBlock",
    "Evidence",
    "FaithfulRecord",
    "FeatureGrams",
    "HeadRecord",
    "History",
    "Hyperparameters",
    "InformationBlock",
    "KroneckerBlock",
    "LayerPriors",
    "LayerRows",
    "LeaveOneOut",
    "LeftOutRecord",
    "MeanFieldBlock",
    "Mode",
    "NotContainedError",
    "Posterior",
    "PrecisionSettings",
    "ScaleCorrection",
    "Size",
    "SubnetworkBlock",
    "TensorField",
    "TensorSpec",
    "WeightPrior",
    "Weights",
    "WideEigenvalueCorrectedBlock",
    "WideKroneckerBlock",
    "jacobian_gram",
    "maximise_evidence",
    "packed",
    "precise_values",
    "search_decades",
]

OFFERED = {"information": "InformationBlock LowRankDiagonal"}
"""By file, the names that come on first use."""

__getattr__ = names_of(__name__, OFFERED)

for _row in (
    ("inf", "posthoc_uq.posteriors.information", "InformationBlock"),
    ("latent_binary", "posthoc_uq.trained.variational", "LatentBinaryBlock"),
    ("median_model", "posthoc_uq.trained.variational", "MedianBlock"),
    ("messages", "posthoc_uq.trained.messages", "MessagesBlock"),
    ("joint_messages", "posthoc_uq.trained.messages", "JointMessagesBlock"),
):
    BLOCKS.later(*_row)
