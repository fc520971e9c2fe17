"""Honest uncertainty for trained PyTorch models, after the fact.

``fit`` a posterior over the weights, ``tune`` or ``calibrate`` it, ``save`` and ``load`` it as one safe file, and
``wrap`` the model so that every prediction comes with its uncertainty, which ``evaluate`` puts to the test.

What fewer users need is imported from its room: `posthoc_uq.evaluation` (metrics and plots), `posthoc_uq.likelihoods`
(all kinds of predictions), `posthoc_uq.heads`, `posthoc_uq.methods`, `posthoc_uq.trained`, `posthoc_uq.fitting`,
`posthoc_uq.app` (the server, drift, export).
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from posthoc_uq.api import PLACES as _PLACES
from posthoc_uq.version import __version__ as __version__

__all__ = sorted(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from posthoc_uq.app.export import (
        export as export,
    )
    from posthoc_uq.core.errors import (
        CorruptPosteriorError as CorruptPosteriorError,
    )
    from posthoc_uq.core.errors import (
        NonFiniteError as NonFiniteError,
    )
    from posthoc_uq.core.errors import (
        PosteriorMismatchError as PosteriorMismatchError,
    )
    from posthoc_uq.core.errors import (
        PosthocUQError as PosthocUQError,
    )
    from posthoc_uq.core.errors import (
        UnsupportedLayerError as UnsupportedLayerError,
    )
    from posthoc_uq.core.model import (
        untied as untied,
    )
    from posthoc_uq.evaluation import (
        Evaluation as Evaluation,
    )
    from posthoc_uq.evaluation import (
        evaluate as evaluate,
    )
    from posthoc_uq.files import (
        inspect as inspect,
    )
    from posthoc_uq.files import (
        load as load,
    )
    from posthoc_uq.files import (
        save as save,
    )
    from posthoc_uq.fitting.calibrate import (
        calibrate as calibrate,
    )
    from posthoc_uq.fitting.fit import (
        fit as fit,
    )
    from posthoc_uq.fitting.outputs import (
        calibrate_outputs as calibrate_outputs,
    )
    from posthoc_uq.fitting.tune import (
        tune as tune,
    )
    from posthoc_uq.fitting.update import (
        update as update,
    )
    from posthoc_uq.fitting.wrap import (
        wrap as wrap,
    )
    from posthoc_uq.heads import (
        Predictor as Predictor,
    )
    from posthoc_uq.heads import (
        Referral as Referral,
    )
    from posthoc_uq.heads import (
        register_head as register_head,
    )
    from posthoc_uq.likelihoods import (
        Bernoulli as Bernoulli,
    )
    from posthoc_uq.likelihoods import (
        Categorical as Categorical,
    )
    from posthoc_uq.likelihoods import (
        ClassPrediction as ClassPrediction,
    )
    from posthoc_uq.likelihoods import (
        Gamma as Gamma,
    )
    from posthoc_uq.likelihoods import (
        Gaussian as Gaussian,
    )
    from posthoc_uq.likelihoods import (
        Heteroscedastic as Heteroscedastic,
    )
    from posthoc_uq.likelihoods import (
        Joint as Joint,
    )
    from posthoc_uq.likelihoods import (
        Likelihood as Likelihood,
    )
    from posthoc_uq.likelihoods import (
        Multilabel as Multilabel,
    )
    from posthoc_uq.likelihoods import (
        NegativeBinomial as NegativeBinomial,
    )
    from posthoc_uq.likelihoods import (
        Ordinal as Ordinal,
    )
    from posthoc_uq.likelihoods import (
        Poisson as Poisson,
    )
    from posthoc_uq.likelihoods import (
        Prediction as Prediction,
    )
    from posthoc_uq.likelihoods import (
        Quantiles as Quantiles,
    )
    from posthoc_uq.likelihoods import (
        RegressionPrediction as RegressionPrediction,
    )
    from posthoc_uq.likelihoods import (
        Survival as Survival,
    )
    from posthoc_uq.likelihoods import (
        sequence_scores as sequence_scores,
    )
    from posthoc_uq.methods import (
        EFB as EFB,
    )
    from posthoc_uq.methods import (
        INF as INF,
    )
    from posthoc_uq.methods import (
        KFAC as KFAC,
    )
    from posthoc_uq.methods import (
        Dense as Dense,
    )
    from posthoc_uq.methods import (
        Diagonal as Diagonal,
    )
    from posthoc_uq.methods import (
        Method as Method,
    )
    from posthoc_uq.methods import (
        Subnetwork as Subnetwork,
    )
    from posthoc_uq.methods import (
        register_method as register_method,
    )
    from posthoc_uq.posteriors import (
        Posterior as Posterior,
    )
    from posthoc_uq.trained import (
        contexts as contexts,
    )
    from posthoc_uq.trained import (
        sparse as sparse,
    )
    from posthoc_uq.trained.function_space import (
        FunctionSpace as FunctionSpace,
    )
    from posthoc_uq.trained.latent_binary import (
        LatentBinary as LatentBinary,
    )
    from posthoc_uq.trained.message_passing.fit import (
        MessagePassing as MessagePassing,
    )
    from posthoc_uq.trained.utvi import (
        UTVI as UTVI,
    )
else:
    # Names come on first use: torch takes seconds, and help or a version need none of it.

    def __getattr__(name: str) -> object:
        if name not in _PLACES:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        module = _import_module(_PLACES[name])
        found = globals()[name] = getattr(module, name, None) or _import_module(f"{_PLACES[name]}.{name}")
        return found

    def __dir__() -> list[str]:
        return sorted({*__all__, *globals()})
