"""The median probability model of a posterior, as a posterior and as a state dict."""

from __future__ import annotations

import copy
from typing import Any, cast

from torch import Tensor, nn

from posthoc_uq.errors import PosthocUQError
from posthoc_uq.posteriors.base import Posterior
from posthoc_uq.posteriors.history import History
from posthoc_uq.posteriors.latent_binary import LatentBlock
from posthoc_uq.posteriors.median_model import median_of
from posthoc_uq.replica import parameter_names, unwrap
from posthoc_uq.values import flag

MEDIAN = "median model"  # in the history of a posterior: which weights it has


def latent_blocks(posterior: Any, what: str) -> dict[str, LatentBlock]:
    """The blocks by the names of their layers.

    Args:
        posterior: of a method whose weights may be off.
        what: asks for them, in words.

    Raises:
        PosthocUQError: it is none.
    """
    if not isinstance(posterior, Posterior):
        raise PosthocUQError(
            f"{what} takes a posterior from uq.fit or uq.load, not a {type(posterior).__name__}."
        )
    blocks = {name: block for name, block in posterior.blocks.items() if isinstance(block, LatentBlock)}
    if len(blocks) < len(posterior.blocks) or not blocks:
        raise PosthocUQError(
            f"{what} is about weights that may be off, and all weights of a posterior by method={posterior.method!r} "
            f"are on; fit one with method=uq.LatentBinary()."
        )
    return blocks


def median_model(posterior: Posterior, certain: bool = False) -> Posterior:
    """The median probability model: the weights whose inclusion is above one half, on for certain; all others are zero.

    Where inclusions are independent and the model is linear with orthogonal inputs, it is the single best model for
    prediction (Barbieri, Berger 2004, "Optimal predictive model selection"). It is a posterior like any other: `wrap`,
    `tune`, `save`, `load`, `report`. A file of it holds the means and variances of the kept weights, and one bit for
    each weight.

    It keeps the likelihood, the hyperparameters (a temperature too, which was chosen for all weights; tune it again on
    held-out data), the statistics for novelty and the history. It does not keep what was measured on predictions of the
    full posterior: the calibration of the moments head and the thresholds of a referral.

    Args:
        posterior: by ``method="latent_binary"``, or such a median model.
        certain: leave out the variances, and put the mean of the flow's ``z`` in its place: one sparse network, which
            predicts in one pass.

    Returns:
        A posterior for the same model; the given one stays as it is.

    Raises:
        PosthocUQError: the posterior is of another method.
    """
    blocks, certain = latent_blocks(posterior, "median_model"), flag("certain", certain)
    frozen = posterior.snapshot()
    median = Posterior(
        posterior.method,
        posterior.layers,
        {name: median_of(block, certain=certain) for name, block in blocks.items()},
        posterior.members,
        posterior.original,
        posterior.likelihood,
        posterior.evidence,
        _history(posterior.history, certain),
        settings=frozen.settings,
    )
    median.model, median.fingerprint = posterior.model, posterior.fingerprint
    median.buffers_fingerprint = posterior.buffers_fingerprint
    median.features = posterior.features
    return median


def _history(history: History, certain: bool) -> History:
    kept = copy.deepcopy(history)
    kept.calibration, kept.referral, kept.faithful = {}, {}, {}
    certain = certain or str(kept.fit.get(MEDIAN, "")).endswith("certain")
    kept.fit[MEDIAN] = "weights of inclusion above 0.5, " + ("certain" if certain else "with their variances")
    if certain:  # all draws are the same
        kept.head = {"name": "sampling", "options": {"n_samples": 1}, "criterion": "given"}
    return kept


def sparse_state_dict(posterior: Posterior) -> dict[str, Any]:
    """The state dict of the median model's means, for the original model's ``load_state_dict``.

    A kept weight is the mean of its slab, times that of ``z`` with a flow; all other weights of the layers with a
    posterior are 0, biases are their means, and what has no posterior is the model's own. All tensors are copies.

    Args:
        posterior: by ``method="latent_binary"``.

    Raises:
        PosthocUQError: the posterior is of another method.
    """
    means = median_means(posterior, "sparse_state_dict")
    model = unwrap(cast(nn.Module, posterior.model))
    names = parameter_names(model)  # a tied parameter has one name, and several keys

    def value(key: str, given: Any) -> Any:
        if not isinstance(given, Tensor):
            return given
        return means.get(names.get(id(given), key), given).detach().clone()

    return {key: value(key, given) for key, given in model.state_dict(keep_vars=True).items()}


def median_means(posterior: Posterior, what: str) -> dict[str, Tensor]:
    """The means of the median model by parameter name, in the parameters' shapes.

    Raises:
        PosthocUQError: the posterior is of another method.
    """
    latent_blocks(posterior, what)
    return median_model(posterior, certain=True).centre
