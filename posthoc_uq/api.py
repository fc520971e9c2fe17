"""The names that ``import posthoc_uq as uq`` offers, and the module that has each."""

_OF_MODULES = {
    "posthoc_uq.app.export": "export",
    "posthoc_uq.core.errors": (
        "CorruptPosteriorError NonFiniteError PosteriorMismatchError PosthocUQError UnsupportedLayerError"
    ),
    "posthoc_uq.core.model": "untied",
    "posthoc_uq.evaluation": "Evaluation evaluate",
    "posthoc_uq.files": "inspect load save",
    "posthoc_uq.fitting.calibrate": "calibrate",
    "posthoc_uq.fitting.fit": "fit",
    "posthoc_uq.fitting.tune": "tune",
    "posthoc_uq.fitting.update": "update",
    "posthoc_uq.fitting.outputs": "calibrate_outputs",
    "posthoc_uq.fitting.wrap": "wrap",
    "posthoc_uq.heads": "Predictor Referral register_head",
    "posthoc_uq.likelihoods": (
        "Bernoulli Categorical ClassPrediction Gamma Gaussian Heteroscedastic Joint Likelihood Multilabel "
        "NegativeBinomial Ordinal Poisson Prediction Quantiles RegressionPrediction Survival sequence_scores"
    ),
    "posthoc_uq.methods": "EFB INF KFAC Dense Diagonal Method Subnetwork register_method",
    "posthoc_uq.posteriors": "Posterior",
    "posthoc_uq.trained": "contexts sparse",
    "posthoc_uq.trained.function_space": "FunctionSpace",
    "posthoc_uq.trained.latent_binary": "LatentBinary",
    "posthoc_uq.trained.message_passing.fit": "MessagePassing",
    "posthoc_uq.trained.utvi": "UTVI",
    "posthoc_uq.version": "__version__",
}

PLACES = {name: module for module, names in _OF_MODULES.items() for name in names.split()}
"""By name, the module that has it."""
