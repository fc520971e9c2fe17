"""How posteriors predict: one file a head, novelty, referral, and functions drawn from a posterior."""

from posthoc_uq.heads.function_kl import function_space_kl
from posthoc_uq.heads.linearized import LinearizedPredictor
from posthoc_uq.heads.moments import MomentsPredictor
from posthoc_uq.heads.predictor import Predictor
from posthoc_uq.heads.referral import Referral
from posthoc_uq.heads.sampling import SamplingPredictor

__all__ = [
    "LinearizedPredictor",
    "MomentsPredictor",
    "Predictor",
    "Referral",
    "SamplingPredictor",
    "function_space_kl",
]
