"""Likelihoods by name, and as plain values in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import did_you_mean
from posthoc_uq.core.registry import Later, Registry
from posthoc_uq.likelihoods.classes import Categorical
from posthoc_uq.likelihoods.gaussian import Gaussian, Heteroscedastic
from posthoc_uq.likelihoods.likelihood import Likelihood

LIKELIHOODS: Registry[type[Likelihood]] = Registry(
    {
        "classification": Categorical,
        "binary": Later("posthoc_uq.likelihoods.bernoulli", "Bernoulli"),
        "regression": Gaussian,
        "multilabel": Later("posthoc_uq.likelihoods.bernoulli", "Multilabel"),
        "ordinal": Later("posthoc_uq.likelihoods.ordinal", "Ordinal"),
        "poisson": Later("posthoc_uq.likelihoods.counts", "Poisson"),
        "negative_binomial": Later("posthoc_uq.likelihoods.counts", "NegativeBinomial"),
        "gamma": Later("posthoc_uq.likelihoods.counts", "Gamma"),
        "heteroscedastic": Heteroscedastic,
        "quantiles": Later("posthoc_uq.likelihoods.quantiles", "Quantiles"),
        "survival": Later("posthoc_uq.likelihoods.survival", "Survival"),
    }
)
"""The likelihoods of this package, by the name that `fit` takes."""
IN_FILES: Registry[type[Likelihood]] = Registry({"joint": Later("posthoc_uq.likelihoods.joint", "Joint")})
"""Those that a file may have besides, which need arguments."""


def resolve_likelihood(
    likelihood: str | Likelihood, noise_variance: Tensor | float | None = None
) -> Likelihood:
    """The `Likelihood` of that name, or the object itself.

    Raises:
        PosthocUQError: the name is unknown, or a noise variance is passed for a likelihood that has none.
    """
    if isinstance(likelihood, Likelihood):
        if noise_variance is not None:
            raise PosthocUQError("A Likelihood object brings its own noise; leave noise_variance out.")
        return likelihood
    if isinstance(likelihood, type) and issubclass(likelihood, Likelihood):
        raise PosthocUQError(f"likelihood is a class; make an object of it: {likelihood.__name__}().")
    if not isinstance(likelihood, str) or likelihood not in LIKELIHOODS:
        several = isinstance(likelihood, (Mapping, list, tuple)) or likelihood == "joint"
        hint = (
            " Of several heads it is uq.Joint(label='classification', value='regression')." if several else ""
        )
        raise PosthocUQError(
            f"likelihood must be one of {sorted(LIKELIHOODS)} or a Likelihood object, not {likelihood!r}."
            f"{hint or did_you_mean(likelihood, LIKELIHOODS)}"
        )
    if likelihood == Gaussian.name:
        return Gaussian(noise_variance)
    if noise_variance is not None:
        raise PosthocUQError(f"noise_variance belongs to likelihood='regression', not to {likelihood!r}.")
    return LIKELIHOODS[likelihood]()


def class_of(name: str) -> type[Likelihood] | None:
    """The class of this package's likelihood that a file calls so; None where there is none."""
    return LIKELIHOODS[name] if name in LIKELIHOODS else IN_FILES.get(name)


def likelihood_to_attributes(likelihood: Likelihood) -> dict[str, Any]:
    """A likelihood as a file keeps it: its attributes, and for a user's class the name of the class.

    Raises:
        PosthocUQError: an attribute is not a plain value.
    """
    attributes = likelihood.attributes()
    if class_of(likelihood.name) is type(likelihood):
        return attributes
    kind = type(likelihood)
    return {
        "name": likelihood.name,
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "attributes": attributes,
    }


def likelihood_from_attributes(description: Mapping[str, Any], given: Likelihood | None = None) -> Likelihood:
    """The likelihood of a description by `likelihood_to_attributes`: made anew if its class is this package's, else
    `given`. No code is looked up by a name in a file.

    Args:
        description: plain values.
        given: an object of the class and with the attributes that are described.

    Raises:
        PosthocUQError: the class is the user's and no object is given, or `given` is another likelihood.
    """
    if given is not None and given.head_likelihoods and description["name"] in IN_FILES:
        several: Any = type(given)
        return several.restore(description, given)
    if given is not None:
        _check_same(description, given)
        return given
    if "class" in description:
        raise PosthocUQError(
            f"it was fitted with the likelihood {_named(description)}, which is not this package's, and nothing is "
            f"imported because a file names it; pass an object of that class: "
            f"uq.load(path, model, likelihood={description['class'].rpartition(':')[2].rpartition('.')[2]}(...))."
        )
    kind = class_of(str(description["name"]))
    assert kind is not None  # `posthoc_uq.files.records` looked
    return kind.restore(description)


def _check_same(description: Mapping[str, Any], given: Likelihood) -> None:
    """Refuse a likelihood that is not the described one. The module of a class is not compared where the class was,
    or is, defined in a script.
    """
    offered = likelihood_to_attributes(given)
    classes = [each.get("class", "").split(":") for each in (description, offered)]
    modules = {module for module, *_ in classes}
    if classes[0][1:] != classes[1][1:] or (len(modules) > 1 and "__main__" not in modules):
        raise PosthocUQError(
            f"it was fitted with the likelihood {_named(description)}, and likelihood= is {_named(offered)}; pass an "
            f"object of the same class."
        )
    fitted, new = description.get("attributes", description), given.attributes()
    different = sorted(name for name in {*fitted, *new} if fitted.get(name) != new.get(name))
    if different:
        was, now = (
            ", ".join(f"{name} {verb} {values.get(name)!r}" for name in different)
            for verb, values in (("was", fitted), ("is", new))
        )
        raise PosthocUQError(
            f"it was fitted with the likelihood {_named(description)}, whose {was}; of likelihood= {now}."
        )


def _named(description: Mapping[str, Any]) -> str:
    class_name = description.get("class")
    return repr(description["name"]) + ("" if class_name is None else f" of the class '{class_name}'")
