"""The rooms of `docs/architecture.md`, held by reading the imports of the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

import posthoc_uq as uq
from posthoc_uq.api import PLACES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "posthoc_uq"


def modules_of(package: Path) -> dict[str, PurePosixPath]:
    """Every module's dotted name, and its file inside the package."""
    modules: dict[str, PurePosixPath] = {}
    for file in sorted(package.rglob("*.py")):
        inside = PurePosixPath(file.relative_to(package).as_posix())
        parts = inside.parent.parts if inside.name == "__init__.py" else inside.with_suffix("").parts
        modules[".".join((package.name, *parts))] = inside
    return modules


def named_imports(name: str, code: str, modules: dict[str, PurePosixPath]) -> Iterator[str]:
    """The modules of the package that a module names in its imports, wherever these stand in its code."""
    folder = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = (
                ".".join(folder.split(".")[: len(folder.split(".")) - node.level + 1]) if node.level else ""
            )
            source = ".".join(filter(None, (above, node.module)))
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                if inner in modules or source in modules:
                    yield inner if inner in modules else source


def imports_of(package: Path) -> dict[str, set[str]]:
    """Every module, and the modules that it imports.

    Python also runs the `__init__.py` of the folders that a name leads through, so those with imports of their own
    count; but for the package's, which runs before everything else.
    """
    modules = modules_of(package)
    named = {
        name: set(named_imports(name, (package / file).read_text(encoding="utf-8"), modules))
        for name, file in modules.items()
    }
    imports: dict[str, set[str]] = {}
    for name, targets in named.items():
        folders = {
            ".".join(parts[:length])
            for parts in (target.split(".") for target in targets)
            for length in range(2, len(parts))
        }
        run = {folder for folder in folders if named[folder] and not name.startswith(f"{folder}.")}
        imports[name] = (targets | run) - {name}
    return imports


def rooms_of(document: str) -> list[str]:
    """The rooms of the table, top to bottom."""
    section = document.split("\n## Rooms\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def room_of(module: str) -> str | None:
    """The room of a module; None of those few that stand at the top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] not in ("__main__", "api", "version") else None


own_imports = cache(lambda: imports_of(PACKAGE))


def upward_imports(imports: dict[str, set[str]], rooms: list[str]) -> list[str]:
    """Imports of a room by one that stands below it."""
    wrong: list[str] = []
    for name, targets in imports.items():
        here = room_of(name)
        for target in sorted(targets):
            there = room_of(target)
            if here and there and rooms.index(there) < rooms.index(here):
                wrong.append(f"{name} imports {target}")
    return wrong


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports, or nothing."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def rooms() -> list[str]:
    return rooms_of((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))


def test_every_module_stands_in_a_room(rooms: list[str]) -> None:
    folders = {file.parts[0] for file in modules_of(PACKAGE).values() if len(file.parts) > 1}
    assert folders == set(rooms)
    loose = {str(file) for file in modules_of(PACKAGE).values() if len(file.parts) == 1}
    assert loose == {"__init__.py", "__main__.py", "api.py", "version.py"}


def test_imports_go_down(rooms: list[str]) -> None:
    assert upward_imports(own_imports(), rooms) == []


OF_APP = {
    "PIL",
    "jsonargparse",
    "matplotlib",
    "pandas",
    "starlette",
    "timm",
    "torchvision",
    "uvicorn",
    "yaml",
}
"""Packages that the wing of what a shell or a server runs imports alone."""


def test_the_core_does_without_the_packages_of_its_wings() -> None:
    for name, file in modules_of(PACKAGE).items():
        if room_of(name) == "app":
            continue
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        for_types = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if node in for_types or not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            found = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            assert not {each.split(".")[0] for each in found} & OF_APP, f"{name} imports {found}"


def test_a_first_fit_imports_what_it_needs() -> None:
    """Of the package, for a last-layer fit with a given prior and a prediction: no wing, and no more than these."""
    code = (
        "import sys, torch, posthoc_uq as uq; from torch import nn\n"
        "model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).eval(); x = torch.randn(64, 8)\n"
        "p = uq.fit(model, [(x, (x[:, 0] > 0).long())], 'kfac', layers='last', prior_precision=1.0, progress=False)\n"
        "uq.wrap(model, p)(x[:5]).probs; print(*[n for n in sys.modules if n.startswith('posthoc_uq')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    modules = run.stdout.split()
    assert not [name for name in modules if room_of(name) in ("app", "trained")]
    assert len(modules) <= 86, sorted(modules)


def test_every_public_name_is_offered() -> None:
    """The names for type checkers are those that come on first use, and each is there."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.col_offset
        for alias in node.names
    }
    assert typed == {name: module for name, module in PLACES.items() if name != "__version__"}
    for name in uq.__all__:
        assert getattr(uq, name) is not None


def doors() -> list[ModuleType]:
    """The package and its rooms: what a room offers, its `__init__` has."""
    names = sorted(name for name in modules_of(PACKAGE) if name.count(".") == 1 and room_of(name))
    return [uq, *(import_module(name) for name in names)]


def offered_by(door: ModuleType) -> set[str]:
    """The names that a room offers: in its `__all__`, and in the table of those that come on first use."""
    on_first_use: dict[str, str] = getattr(door, "OFFERED", {})
    return {*getattr(door, "__all__", ()), *" ".join(on_first_use.values()).split()}


def test_every_room_has_what_it_offers() -> None:
    for door in doors():
        for name in offered_by(door):
            assert getattr(door, name) is not None, f"{door.__name__}.{name}"


def inside_names(code: str, modules: set[str], open_modules: set[str]) -> set[str]:
    """The names of modules inside of rooms that a test's code imports, reads of an imported module, or has in a string.

    Args:
        code: of a test.
        modules: all modules of the package, by their dotted names.
        open_modules: those of which a test may have every name without an underscore: doors, and what they offer.
    """

    imported: dict[str, str] = {}
    found: set[tuple[str, str]] = set()

    def full(node: ast.expr) -> str:
        """A module's dotted name, of what a test calls it; nothing for what is no module."""
        if isinstance(node, ast.Attribute):
            above = full(node.value)
            return f"{above}.{node.attr}" if above else ""
        return imported.get(node.id, "") if isinstance(node, ast.Name) else ""

    nodes = list(ast.walk(ast.parse(code)))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.update(
                {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            )
            found.update((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # what is replaced for a test, and code that runs in a process of its own
            found.update(re.findall(r"(posthoc_uq(?:\.\w+)+)(?:\.| import )(\w*)", node.value))
    for node in nodes:
        if isinstance(node, ast.Attribute):
            found.add((full(node.value), node.attr))
        elif isinstance(node, ast.Call) and len(node.args) > 1:  # `setattr(module, "name", ...)`
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            found.update({(full(node.args[0]), name)} if isinstance(name, str) else ())
    return {
        f"{module}.{name}"
        for module, name in found
        if module in modules
        and f"{module}.{name}" not in modules
        and (module not in open_modules or re.match("_[^_]", name))
    }


MOST_INSIDE_NAMES = 248
"""Of all files of the tests together; to be lowered where a change allows it."""


def test_tests_come_through_the_doors() -> None:
    """A test says what it has to say through `uq` or what a room offers, so that a room can change inside."""
    modules = set(modules_of(PACKAGE))
    offered = (getattr(door, name) for door in doors() for name in offered_by(door))
    open_modules = {door.__name__ for door in doors()}
    open_modules |= {each.__name__ for each in offered if isinstance(each, ModuleType)}
    inside = {
        file.name: inside_names(file.read_text(encoding="utf-8"), modules, open_modules)
        for file in sorted(Path(__file__).parent.glob("*.py"))
    }
    most = sorted(inside, key=lambda name: -len(inside[name]))[:5]
    assert sum(map(len, inside.values())) <= MOST_INSIDE_NAMES, {name: sorted(inside[name]) for name in most}


def test_a_name_is_one_class() -> None:
    """No two classes, nor a class and a type alias, have one name; an underscore makes no other name of it."""
    places: dict[str, list[str]] = {}
    aliases: dict[str, list[str]] = {}
    for file in modules_of(PACKAGE).values():
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{file}:{node.lineno}")
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id.lstrip("_")
                aliases.setdefault(name, []).append(f"{file}:{node.lineno}")
    found = {name: [*where, *aliases.get(name, [])] for name, where in places.items()}
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_no_imports_form_a_circle() -> None:
    assert circle_in(own_imports()) == []


class TestReading:
    """What the tests above rely on, shown on a small package."""

    TABLE = (
        "\n## Rooms\n\n| room | what |\n| --- | --- |\n| `top` | . |\n| `high` | . |\n| `low` | . |\n"
        "\n## Other\n\n| `none` | . |\n"
    )

    @pytest.fixture
    def package(self, tmp_path: Path) -> Path:
        code = {
            "__init__.py": "",
            "top/__init__.py": "from house.high import a\nimport house.low.d",
            "high/__init__.py": "",
            "high/a.py": "from .b import x\nfrom ..low import d",
            "high/b.py": "from house.low.c import y",
            "low/__init__.py": "from house.low.c import y",
            "low/c.py": "y = 1",
            "low/d.py": "",
        }
        for name, text in code.items():
            file = tmp_path / "house" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "house"

    def test_the_table(self) -> None:
        assert rooms_of(self.TABLE) == ["top", "high", "low"]
        assert room_of("house.low.c") == "low"
        assert room_of("house.version") is None

    def test_the_imports(self, package: Path) -> None:
        imports = imports_of(package)
        assert imports["house.top"] == {"house.high.a", "house.low", "house.low.d"}
        assert imports["house.high.a"] == {"house.high.b", "house.low", "house.low.d"}
        assert imports["house.low"] == {"house.low.c"}
        assert upward_imports(imports, rooms_of(self.TABLE)) == []
        assert circle_in(imports) == []

    @pytest.mark.parametrize(
        "code",
        [
            "import house.high.b",
            "from house.high import b",
            "from ..high.b import x",
            "def f():\n    from house.high.b import x",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.high.b import x",
        ],
    )
    def test_an_import_upward_in_a_circle(self, package: Path, code: str) -> None:
        (package / "low" / "c.py").write_text(code)
        imports = imports_of(package)
        assert upward_imports(imports, rooms_of(self.TABLE)) == ["house.low.c imports house.high.b"]
        assert {"house.low.c", "house.high.b"} <= set(circle_in(imports))

    def test_a_circle_through_the_file_of_a_folder(self, package: Path) -> None:
        (package / "low" / "c.py").write_text("")
        (package / "low" / "__init__.py").write_text("from house.high.b import x")
        assert "house.low" in circle_in(imports_of(package))

    @pytest.mark.parametrize(
        ("code", "names"),
        [
            ("from house.low.c import y, _z", {"house.low.c.y", "house.low.c._z"}),
            ("from house.low import y, _z", {"house.low._z"}),
            ("from house.low import c\nc.y, c.y, c.x", {"house.low.c.y", "house.low.c.x"}),
            ("import house.low.c as m\nm.y", {"house.low.c.y"}),
            ("import house.low.c\nhouse.low.c.y", {"house.low.c.y"}),
            ("from house.low import d\nd.y, d._z", {"house.low.d._z"}),
            ("import house as h\nh.low.c.y, h.low.y, h.y", {"house.low.c.y"}),
            ("from house.low import c\npatch.setattr(c, 'y', 1)", {"house.low.c.y"}),
            ("import torch\nfrom torch import nn\nnn.Linear, y.c", set()),
        ],
    )
    def test_the_names_inside(self, code: str, names: set[str]) -> None:
        modules = {"house", "house.low", "house.low.c", "house.low.d"}
        assert inside_names(code, modules, {"house", "house.low", "house.low.d"}) == names

    @pytest.mark.parametrize("text", ["posthoc_uq.low.c.y", "import os; from posthoc_uq.low.c import y"])
    def test_the_names_inside_a_string(self, text: str) -> None:
        names = inside_names(repr(text), {"posthoc_uq.low.c"}, set())
        assert names == {"posthoc_uq.low.c.y"}


def test_no_test_imports_another() -> None:
    """What several tests share stands in files of its own."""
    another = re.compile(r"^ *(?:from (?:\w+\.)*test_\w+ import|import .*\btest_\w+)", re.MULTILINE)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        assert not another.findall(file.read_text(encoding="utf-8")), file.name
    assert another.findall("    from tests.test_a import b\nimport c, test_d\n") == [
        "    from tests.test_a import",
        "import c, test_d",
    ]
