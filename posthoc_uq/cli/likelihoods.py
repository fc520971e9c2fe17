"""The likelihood of a fit from the command line: its name, and the arguments of its class as text."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.likelihoods import LIKELIHOODS, Likelihood


def likelihood_of(name: str, options: Sequence[str]) -> str | Likelihood:
    """The name, or with options the object.

    Args:
        name: of a likelihood of the package.
        options: texts ``name=value`` for the arguments of its class; a list has commas between its numbers.

    Raises:
        PosthocUQError: an option has another form, is not the likelihood's, or has a value that it refuses.
    """
    if not options:
        return name
    known = list(inspect.signature(LIKELIHOODS[name]).parameters)
    arguments: dict[str, Any] = {}
    for text in options:
        option, equals, value = text.partition("=")
        option = option.strip().replace("-", "_")
        if not equals or option not in known:
            raise PosthocUQError(
                f"--likelihood-option {text!r} is none of likelihood {name!r}; it has "
                + (f"{', '.join(f'{own}=...' for own in known)}." if known else "no options.")
            )
        arguments[option] = _value(value)
    return LIKELIHOODS[name](**arguments)


def _value(text: str) -> Any:
    """A number, true or false, a list of numbers; else the text, which the likelihood refuses."""
    try:
        return json.loads(f"[{text}]" if "," in text and not text.strip().startswith("[") else text.lower())
    except ValueError:
        return text
