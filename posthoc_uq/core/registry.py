"""Things by name: the package's own, those of a wing that is imported when one of them is asked for, and a user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeVar, cast

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Later:
    """What a module has under a name, with dots where it is an attribute's attribute."""

    module: str
    name: str

    def load(self) -> Any:
        """Import the module, and get it."""
        return attrgetter(self.name)(import_module(self.module))


def names_of(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` that imports what the package offers when it is first asked for.

    Args:
        package: its name.
        places: by the name of a module in the package, the names that it has, with spaces between them.
    """
    modules = {name: module for module, names in places.items() for name in names.split()}

    def offered(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return offered


class Registry(MutableMapping[str, Thing]):
    """A dictionary that loads what it has `Later` when that is asked for. Its names are known without loading.

    Args:
        rows: by name.
        hidden: more of them, which nobody chooses: they are found by their names, and not listed.
    """

    def __init__(
        self,
        rows: Mapping[str, Thing | Later] | None = None,
        hidden: Mapping[str, Thing | Later] | None = None,
    ) -> None:
        self._rows: dict[str, Thing | Later] = dict(rows or {})
        self._hidden: dict[str, Thing | Later] = dict(hidden or {})

    def add(self, name: str, thing: Thing) -> Thing:
        """Enter a thing, unless another has the name; gives the one that has it."""
        known = self._rows.get(name)
        if known is None or isinstance(known, Later):
            self._rows[name] = thing
        return cast(Thing, self._rows[name])

    def later(self, name: str, module: str, attribute: str) -> None:
        """Enter what a module has, unless something has the name."""
        self._rows.setdefault(name, Later(module, attribute))

    def __getitem__(self, name: str) -> Thing:
        rows = self._hidden if name in self._hidden else self._rows
        found = rows[name]
        if isinstance(found, Later):
            found = rows[name] = cast(Thing, found.load())
        return found

    def __setitem__(self, name: str, thing: Thing) -> None:
        self._rows[name] = thing

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in self._hidden

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def shown_names(value: object, base: type) -> list[str]:
    """What ``dir`` shows of an object: its public names, and those of its classes from `base` on, without those that a
    class of these lists as ``_hidden``, since the package alone calls them.
    """
    kinds = [kind for kind in type(value).__mro__ if issubclass(kind, base)]
    hidden = {name for kind in kinds for name in vars(kind).get("_hidden", ())}
    names = {*vars(value), *(name for kind in kinds for name in vars(kind))}
    return sorted(name for name in names - hidden if not name.startswith("_"))
