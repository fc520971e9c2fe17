"""The floors of `docs/architecture.md`, held by reading the imports of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

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


def rows_of(document: str) -> list[list[str]]:
    """The rows of the table of floors, top to bottom: files, and folders with a slash at their end.

    A name without a folder stands in the folder of the name before it in its row.
    """
    section = document.split("\n## Floors\n", 1)[1].split("\n## ", 1)[0]
    rows: list[list[str]] = []
    for line in section.splitlines():
        if line.startswith("| `"):
            folder, row = "", list[str]()
            for entry in re.findall(r"`([^`]+)`", line.split("|")[1]):
                if "/" in entry.rstrip("/"):
                    folder = entry.rstrip("/").rpartition("/")[0] + "/"
                    row.append(entry)
                else:
                    row.append(folder + entry)
            rows.append(row)
    return rows


def floor_of(file: PurePosixPath, rows: list[list[str]]) -> int | None:
    """The number of a file's row: its own, or its folder's; an `__init__.py` without one is with its folder's first."""
    places = {entry: number for number, row in enumerate(rows) for entry in row}
    candidates = [str(file), *(f"{folder}/" for folder in file.parents)]
    found = next((places[entry] for entry in candidates if entry in places), None)
    if found is None and file.name == "__init__.py":
        inside = [number for entry, number in places.items() if entry.startswith(f"{file.parent}/")]
        return min(inside, default=None)
    return found


def upward_imports(package: Path, rows: list[list[str]]) -> list[str]:
    """Imports of anything but what stands below or in the same folder."""
    modules = modules_of(package)
    floors = {name: floor_of(file, rows) for name, file in modules.items()}
    wrong: list[str] = []
    for name, targets in imports_of(package).items():
        for target in sorted(targets):
            here, there = floors[name], floors[target]
            same_folder = len(modules[name].parts) > 1 and modules[name].parts[0] == modules[target].parts[0]
            if here is not None and there is not None and there <= here and not same_folder:
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
def rows() -> list[list[str]]:
    return rows_of((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))


def test_every_module_stands_in_the_table_and_the_table_names_nothing_else(rows: list[list[str]]) -> None:
    files = list(modules_of(PACKAGE).values())
    assert [str(file) for file in files if floor_of(file, rows) is None] == []
    entries = [entry for row in rows for entry in row]
    assert sorted(entries) == sorted(set(entries))
    assert [entry for entry in entries if not (PACKAGE / entry).exists()] == []
    assert [e for e in entries if (PACKAGE / e).is_dir() != e.endswith("/")] == []


def test_imports_go_down(rows: list[list[str]]) -> None:
    assert upward_imports(PACKAGE, rows) == []


def test_inference_does_not_know_the_heads() -> None:
    imports = imports_of(PACKAGE)
    inference = [name for name in imports if name.startswith("posthoc_uq.inference.")]
    assert inference
    assert [n for n in inference if any(t.startswith("posthoc_uq.heads") for t in imports[n])] == []


def test_no_imports_form_a_circle() -> None:
    assert circle_in(imports_of(PACKAGE)) == []


class TestReading:
    """What the tests above rely on, shown on a small package."""

    TABLE = (
        "\n## Floors\n\n| module | what |\n| --- | --- |\n"
        "| `top.py` | . |\n| `high/a.py`, `b.py` | . |\n| `low/` | . |\n\n## Other\n\n| `none.py` | . |\n"
    )

    @pytest.fixture
    def package(self, tmp_path: Path) -> Path:
        code = {
            "__init__.py": "",
            "top.py": "from house.high import a\nimport house.low.d",
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
        assert rows_of(self.TABLE) == [["top.py"], ["high/a.py", "high/b.py"], ["low/"]]
        assert floor_of(PurePosixPath("low/deep/c.py"), rows_of(self.TABLE)) == 2
        assert floor_of(PurePosixPath("high/__init__.py"), rows_of(self.TABLE)) == 1
        assert floor_of(PurePosixPath("high/c.py"), rows_of(self.TABLE)) is None

    def test_the_imports(self, package: Path) -> None:
        imports = imports_of(package)
        assert imports["house.top"] == {"house.high.a", "house.low", "house.low.d"}
        assert imports["house.high.a"] == {"house.high.b", "house.low", "house.low.d"}
        assert imports["house.low"] == {"house.low.c"}
        assert upward_imports(package, rows_of(self.TABLE)) == []
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
        assert upward_imports(package, rows_of(self.TABLE)) == ["house.low.c imports house.high.b"]
        assert {"house.low.c", "house.high.b"} <= set(circle_in(imports_of(package)))

    def test_a_circle_through_the_file_of_a_folder(self, package: Path) -> None:
        (package / "low" / "c.py").write_text("")
        (package / "low" / "__init__.py").write_text("from house.high.b import x")
        assert "house.low" in circle_in(imports_of(package))

    def test_modules_of_one_row_stand_side_by_side(self, package: Path) -> None:
        (package / "other.py").write_text("import house.top")
        rows = rows_of(self.TABLE.replace("`top.py`", "`top.py`, `other.py`"))
        assert upward_imports(package, rows) == ["house.other imports house.top"]


def test_no_test_imports_another() -> None:
    """What several tests share stands in files of its own."""
    tests = Path(__file__).parent
    for file in sorted(tests.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[-1].startswith("test_")], file.name
