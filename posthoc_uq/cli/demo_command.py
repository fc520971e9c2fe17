"""``posthoc-uq demo``."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click

from posthoc_uq.cli.console import Command, print_json
from posthoc_uq.cli.options import force_option


@click.command("demo", cls=Command, short_help="Run the library on handwritten digits.")
@click.option(
    "--output",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("demo_output"),
    show_default=True,
    help="A new or empty folder.",
)
@force_option
@click.option("--seed", type=int, default=0, show_default=True)
def command(folder: Path, force: bool, seed: int, as_json: bool) -> None:
    """Run the library on real input: a small network on handwritten digits.

    Prints tables and leaves a page, figures and a posterior file in the output folder. Needs the packages of the
    extra demo: pip install 'posthoc-uq[demo]'.

    \b
    Examples:
      posthoc-uq demo
      posthoc-uq demo --output /tmp/demo
    """
    from posthoc_uq.cli.demo import NEEDED, main
    from posthoc_uq.core.errors import PosthocUQError

    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise PosthocUQError(f"The demo needs {', '.join(missing)}: pip install 'posthoc-uq[demo]'.")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise PosthocUQError(
            f"The folder '{folder}' is not empty; give another one with --output, or --force to write over its files."
        )
    arguments = ["--output", str(folder), "--seed", str(seed)]
    if not as_json:
        sys.exit(main(arguments))
    with redirect_stdout(sys.stderr):
        code = main(arguments)
    files: list[Any] = sorted(str(path) for path in folder.rglob("*") if path.is_file())
    print_json({"output": str(folder), "succeeded": code == 0, "files": files})
    sys.exit(code)
