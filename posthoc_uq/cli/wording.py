"""Messages of the library, which speak Python, in the words of the command line."""

from __future__ import annotations

import re

import click

_LIKELIHOOD = re.compile(r"likelihood=uq\.(\w+)\(([^()]*)\)")
_SETTING = re.compile(r"\b([a-z][a-z_]*)=(?:'([^']*)'|\"([^\"]*)\"|(-?[\w.+-]*\w)\b(?![\w(.]))")


def in_options(text: str, context: click.Context | None) -> str:
    """The text with the options of the running command in place of the arguments of functions, where there are such
    options: ``--likelihood binary`` for ``likelihood='binary'``.
    """
    if context is None:
        return text
    options = {parameter.name: parameter for parameter in context.command.get_params(context)}

    def as_option(found: re.Match[str]) -> str:
        name, value = found[1], next((part for part in found.groups()[1:] if part is not None), "")
        parameter = options.get(name)
        flag = f"--{name.replace('_', '-')}"
        if parameter is None or flag not in parameter.opts or getattr(parameter, "is_flag", False):
            return found[0]
        return f"{flag} {value}"

    def as_likelihood(found: re.Match[str]) -> str:
        from posthoc_uq.likelihoods import LIKELIHOODS

        name = next((name for name, kind in LIKELIHOODS.items() if kind.__name__ == found[1]), None)
        if name is None or not {"likelihood", "likelihood_option"} <= options.keys():
            return found[0]
        settings = [part.strip() for part in found[2].split(",") if "=" in part]
        return " ".join([f"--likelihood {name}", *(f"--likelihood-option {own}" for own in settings)])

    return _SETTING.sub(as_option, _LIKELIHOOD.sub(as_likelihood, text))
