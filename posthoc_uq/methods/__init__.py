"""The methods by which a posterior is fitted, one file each.

To add one, write a subclass of `Laplace` if it sums over the data, of `Training` if it optimises, or else of `Method`,
in its own file, and a row below; trainings, in the wing `posthoc_uq.trained`, are imported when they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from posthoc_uq.core.errors import PosthocUQError
from posthoc_uq.core.options import check_names, did_you_mean, shown
from posthoc_uq.core.registry import Registry, names_of
from posthoc_uq.methods.laplace import EFB, KFAC, Basis, Dense, Diagonal, Laplace, squares_of
from posthoc_uq.methods.method import Method
from posthoc_uq.posteriors.block import FAMILIES

if TYPE_CHECKING:
    from posthoc_uq.methods.inf import INF
    from posthoc_uq.methods.subnetwork import Subnetwork

__all__ = [
    "EFB",
    "INF",
    "KFAC",
    "METHODS",
    "Basis",
    "Dense",
    "Diagonal",
    "Laplace",
    "Method",
    "Subnetwork",
    "method_of",
    "register_method",
    "squares_of",
]

METHODS: Registry[type[Method]] = Registry()
"""All methods by name, for `posthoc_uq.fit`, the command line, files and the tests."""

OFFERED = {
    "inf": "INF",
    "subnetwork": "Subnetwork",
    # what a running fit has, and how it goes on after it was killed
    "task": "Task",
    "checkpoint": "Checkpoint fit_identity identified read_snapshot write_snapshot",
}
"""By file, the names that come on first use."""

__getattr__ = names_of(__name__, OFFERED)

AnyMethod = TypeVar("AnyMethod", bound=type[Method])


def register_method(kind: AnyMethod) -> AnyMethod:
    """Make a method known by its name; a decorator for methods outside of this package.

    Raises:
        PosthocUQError: another method has the name, or a file cannot hold the name.

    Example:
        ```python
        from dataclasses import dataclass

        @uq.register_method
        @dataclass(frozen=True, kw_only=True)
        class Mine(uq.KFAC):
            name = "mine"
        ```
    """
    if re.fullmatch(r"[a-z0-9_]{1,16}", kind.name) is None:
        raise PosthocUQError(
            f"A method's name has 1 to 16 small letters, digits and underscores; not {kind.name!r}."
        )
    known = METHODS.get(kind.name)
    if known is not None and known is not kind:
        raise PosthocUQError(
            f"There is a method {kind.name!r} already, {known.__module__}.{known.__qualname__}."
        )
    METHODS[kind.name] = kind
    FAMILIES[kind.name] = kind.block_kinds
    return kind


for _kind in (EFB, KFAC, Diagonal, Dense):
    register_method(_kind)
for _name, _module, _class in (
    ("inf", "posthoc_uq.methods.inf", "INF"),
    ("subnetwork", "posthoc_uq.methods.subnetwork", "Subnetwork"),
    ("function_space", "posthoc_uq.trained.function_space", "FunctionSpace"),
    ("latent_binary", "posthoc_uq.trained.latent_binary", "LatentBinary"),
    ("message_passing", "posthoc_uq.trained.message_passing.fit", "MessagePassing"),
    ("utvi", "posthoc_uq.trained.utvi", "UTVI"),
):
    METHODS.later(_name, _module, _class)
    FAMILIES.later(_name, _module, f"{_class}.block_kinds")


def _meant(method: object) -> str:
    """`` Did you mean 'inf'?`` for a name in other letters, that of a class, or a mistyped one; or nothing."""
    known = {name: name for name in METHODS} | {kind.__name__.lower(): name for name, kind in METHODS.items()}
    return did_you_mean(known.get(method.lower(), method) if isinstance(method, str) else method, METHODS)


def method_of(
    method: str | Method, options: Mapping[str, Any] | None = None, others: Iterable[str] = ()
) -> Method:
    """The method of that name with these options, or the object itself.

    Args:
        method: a name out of `METHODS`, or an object.
        options: of a method that is given by name; None is a value like any other.
        others: names of arguments beside those options, one of which may have been meant.

    Raises:
        PosthocUQError: the name is unknown, or the method does not take an option or its value.
    """
    chosen = dict(options or {})
    if isinstance(method, Method):
        if chosen:
            written = ", ".join(f"{name}=..." for name in chosen)
            raise PosthocUQError(
                f"The method is given as an object, so its options belong there: {type(method).__name__}({written})."
            )
        return method
    if isinstance(method, type) and issubclass(method, Method):
        raise PosthocUQError(f"method is a class; make an object of it: uq.{method.__name__}().")
    if not isinstance(method, str) or method not in METHODS:
        raise PosthocUQError(
            f"method must be one of {sorted(METHODS)} or a Method object, not {shown(method)}.{_meant(method)}"
            f"{' The data are one argument: uq.fit(model, [(inputs, targets)]).' if hasattr(method, 'shape') else ''}"
        )
    kind = METHODS[method]
    check_names(f"method={method!r}", chosen, (f.name for f in fields(kind)), others)
    return kind(**chosen)
