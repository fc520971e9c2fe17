"""The commands of the documents exist, their links lead somewhere, and the reference has every public name."""

from __future__ import annotations

import csv
import importlib
import re
import shlex
from collections.abc import Iterator

import pytest
from documents import PAGES, ROOT, blocks, fences, without_blocks

import posthoc_uq as uq
from posthoc_uq.app import WrongUsage
from posthoc_uq.app.cli import commands
from posthoc_uq.app.cli.parser import Command


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page: str) -> None:
    """Code is Python, which is run, or a command, which is checked; no other block has any."""
    for language, content in ((block.language, block.content) for block in fences(page)):
        assert language in ("python", "bash", "text", "json", "yaml"), content
        if language == "text":
            assert not re.search(r"^\s*(import|from|>>>|posthoc-uq|python|make) |\buq\.", content, re.M), (
                content
            )


def written(page: str) -> Iterator[tuple[list[str], bool]]:
    """The commands of a page, and whether each is complete: those of its blocks, and those of its sentences."""
    for language, content in ((block.language, block.content) for block in fences(page)):
        if language == "bash":
            for line in content.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                if words:
                    yield words, True
    for command in re.findall(r"`(posthoc-uq [a-z]+[^`]*)`", without_blocks(ROOT / page)):
        yield shlex.split(command), False


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    for words, complete in written(page):
        program, *arguments = words
        if program == "torchrun":
            program, arguments = "python", arguments[2:]
        if program.endswith("python") and arguments[:2] == ["-m", "posthoc_uq"]:
            program, arguments = "posthoc-uq", arguments[2:]
        if program == "posthoc-uq":
            check_options(arguments, complete)
        elif program.endswith("python"):
            check_script(arguments)
        elif program == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
            assert set(arguments) <= set(targets), words
        elif program.endswith("pip") and "-r" in arguments:
            assert (ROOT / arguments[-1]).is_file(), words
        else:
            assert program in ("pip", "curl", "apt-get", ".venv/bin/pre-commit"), words


def check_options(arguments: list[str], complete: bool) -> None:
    """The command of ``posthoc-uq`` has these options with such values, and a complete one has all that it needs."""
    if "--help" in arguments:
        return
    try:
        Command(getattr(commands, arguments[0]), arguments[1:]).parse(arguments[1:])
    except WrongUsage as error:
        assert not complete and "must be given" in str(error), (arguments, str(error))


def check_script(arguments: list[str]) -> None:
    """The script is there, and it or a module beside it, or one of the recipes, has these options."""
    if arguments[0] == "-m" and arguments[1].startswith("recipes."):
        arguments = [arguments[1].replace(".", "/") + ".py", *arguments[2:]]
    if arguments[0] == "-m" or "/" not in arguments[0]:  # a module of others, or the reader's own file
        return
    script = ROOT / arguments[0]
    modules = (*script.parent.glob("*.py"), *(ROOT / "recipes").rglob("*.py"))
    sources = "".join(module.read_text(encoding="utf-8") for module in modules)
    assert script.is_file(), arguments
    for option in arguments[1:]:
        assert not option.startswith("--") or f'"{option}"' in sources, arguments


def test_every_figure_beside_the_papers_has_its_command_and_its_time() -> None:
    with (ROOT / "docs" / "tables" / "papers.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        command = row["command"]
        assert row["number"] and row["here"] and row["in the paper"], row
        if row["here"] == "not measured":
            assert row["why they differ, or what differs"] and not command, row
            continue
        assert row["time on one free core"], row
        scripts = re.findall(r"python ([^;]*)", command)
        assert scripts or command.startswith("as the row"), row
        for script in scripts:
            check_script(shlex.split(re.split(r", (?:and )?with | \(", script)[0]))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    for target in re.findall(r"\]\(([^()\s]+)\)", without_blocks(ROOT / page)):
        path, _, heading = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        there = (ROOT / page).parent / path if path else ROOT / page
        assert there.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", without_blocks(there), re.M)
            assert heading in {re.sub(r"[^\w-]+", "", title.lower().replace(" ", "-")) for title in titles}, (
                target
            )


def test_every_public_name_has_its_place_in_the_reference() -> None:
    pages = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "reference").glob("*.md"))
    named = {line.rpartition(".")[2] for line in pages.splitlines() if line.startswith("::: ")}
    assert {name for name in uq.__all__ if not name.startswith("_")} <= named


def test_every_document_is_in_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs').as_posix()}\n" in navigation + "\n", page
    for page in ROOT.glob("recipes/*/README.md"):
        assert f": recipes/{page.parent.name}.md\n" in navigation, page


def test_the_generated_reference_has_every_command_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    text = "\n".join(importlib.import_module("generated").command_line())
    for words, _ in written("docs/command_line.md"):
        assert words[0] != "posthoc-uq" or f"\n## posthoc-uq {words[1]}\n" in text
    for option in (
        "--class-map",
        "--method.rank",
        "--referral-rate",
        "--head.link",
        "--max-pixels",
        "--json",
    ):
        assert text.count(f"| `{option}`") == 1, option


def test_code_fits_the_column_of_a_page() -> None:
    long = {
        f"{page}: {line}"
        for page in PAGES
        for block in blocks(page)
        for line in block.content.splitlines()
        if len(line) > 66
    }
    assert not long
