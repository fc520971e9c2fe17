"""What all recipes share: options, batches and the training loop, tables with their spread, files of results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from posthoc_uq import PosthocUQError
from posthoc_uq.files.atomic import checked_target, write

OUTPUT = Path(__file__).resolve().parent / "output"
NOTE = "Smoke run: it shows that the recipe runs. These numbers are not results."
Batch = tuple[Tensor, Tensor]
Row = Mapping[str, Any]


def parser(description: str | None, recipe: str, smoke: str) -> argparse.ArgumentParser:
    """A command line with ``--smoke`` and ``--output``.

    Args:
        description: the script's docstring.
        recipe: name of the recipe's folder in the output folder.
        smoke: what a smoke run leaves out.
    """
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--smoke", action="store_true", help=smoke)
    found.add_argument("--output", type=Path, default=OUTPUT / recipe, help="folder for all that is written")
    return found


def parsed(
    command: argparse.ArgumentParser, arguments: Sequence[str] | None = None, **smoke: Any
) -> argparse.Namespace:
    """The options that are given, with the output folder made.

    Args:
        command: see `parser`.
        arguments: by default the process's own.
        smoke: values that a smoke run puts in place of the options'.
    """
    options = command.parse_args(arguments)
    if options.smoke:
        vars(options).update(smoke)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        checked_target(options.output / "page.md")
    except OSError as error:
        command.error(f"--output {options.output}: {error.strerror}.")
    except PosthocUQError as error:
        command.error(f"--output: {error}")
    return options


def existing(text: str) -> Path:
    """The type of an option that names a file or folder to be read."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no file or folder '{text}'")
    return Path(text)


@contextmanager
def looked_at() -> Generator[None]:
    """Around all that a run reads, before its work: what is missing or wrong there ends the run with one sentence.
    What libraries raise for a file that is not what it should be is of any kind.
    """
    try:
        yield
    except ImportError as error:
        raise SystemExit(f"error: {error}; see requirements.txt beside this recipe.") from error
    except Exception as error:
        raise SystemExit(f"error: {' '.join(str(error).split()) or type(error).__name__}") from error


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Those names that fit one of the patterns.

    Raises:
        ValueError: none fits one of them.
    """
    known = list(names)
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in known):
            raise ValueError(f"Nothing fits '{pattern}'; there are {', '.join(known)}.")
    return [name for name in known if any(fnmatch(name, pattern) for pattern in patterns)]


def in_order(inputs: Tensor, targets: Tensor, size: int) -> list[Batch]:
    """Batches of samples as they come."""
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def in_random_order(
    inputs: Tensor, targets: Tensor, size: int, generator: torch.Generator | None
) -> Iterator[Batch]:
    """Batches of one epoch."""
    for rows in torch.randperm(len(targets), generator=generator).split(size):
        yield inputs[rows], targets[rows]


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Callable[[Tensor, Tensor], Tensor],
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> float:
    """One step for each batch, in the model's present mode; the mean loss.

    Args:
        model: is trained in place.
        batches: inputs and targets.
        loss: of outputs and targets.
        optimiser: of the model's parameters.
        schedule: of the rate, which goes on by one step with every batch.
    """
    losses: list[float] = []
    for inputs, targets in batches:
        optimiser.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimiser.step()
        if schedule is not None:
            schedule.step()
        losses.append(value.item())
    optimiser.zero_grad()
    return mean(losses)


def predicted(predict: Callable[[Tensor], Any], inputs: Tensor, size: int) -> Any:
    """The outputs of a network, or the prediction of a head, for many inputs in batches of `size`."""
    with torch.no_grad():
        parts = [predict(part) for part in inputs.split(size)]
    return torch.cat(parts) if isinstance(parts[0], Tensor) else type(parts[0]).cat(parts)


def markdown(rows: Sequence[Sequence[str]] | Sequence[Mapping[str, str]]) -> str:
    """A table; the first row is its header, or the keys of the first one are."""
    lines = [list(row.values()) if isinstance(row, Mapping) else list(row) for row in rows]
    if isinstance(rows[0], Mapping):
        lines.insert(0, list(rows[0]))
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(
    rows: Mapping[str, Row | Sequence[Row]],
    form: str = ".3f",
    *,
    columns: Sequence[str] | None = None,
    corner: str = "",
    error: bool = False,
) -> str:
    """Named rows of numbers as a table; what a row lacks is a dash.

    Args:
        rows: by name numbers by column, or such numbers of several seeds or splits.
        form: of a number.
        columns: in this order; by default all.
        corner: title of the names.
        error: give the standard error of a mean over several in place of their standard deviation.
    """
    several = {name: [row] if isinstance(row, Mapping) else row for name, row in rows.items()}
    found = columns or list(
        dict.fromkeys(key for all_of in several.values() for row in all_of for key in row)
    )
    lines = [[corner, *found]]
    for name, all_of in several.items():
        values = [[row[column] for row in all_of if row.get(column) is not None] for column in found]
        lines.append([name, *(spread(numbers, form, error=error) for numbers in values)])
    return markdown(lines)


def by_row(results: Sequence[Mapping[str, Row]]) -> dict[str, list[Row]]:
    """Results of several seeds, each with named rows, as rows with one entry a seed."""
    names = dict.fromkeys(name for result in results for name in result)
    return {name: [result[name] for result in results if name in result] for name in names}


def spread(values: Sequence[float], form: str = ".3f", *, error: bool = False) -> str:
    """``mean ± standard deviation``, or ``± standard error``; the number alone where there is one."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:{form}}"
    deviation = stdev(values) / (len(values) ** 0.5 if error else 1)
    return f"{mean(values):{form}} ± {deviation:{'.2g' if form.endswith('g') else form}}"


def save_figure(figure: Figure, path: Path, smoke: bool) -> None:
    """As PNG; one of a smoke run says so across itself."""
    if smoke:
        style = {"rotation": 20, "ha": "center", "va": "center", "fontsize": 26}
        figure.text(0.5, 0.5, "smoke run, not results", color="#CC3311", alpha=0.5, **style)
    image = BytesIO()
    figure.savefig(image, format=path.suffix[1:], dpi=110)
    write(path, image)


def put(path: Path, text: str) -> None:
    """A text in place of what was in a file, which a full disk leaves as it was."""
    write(path, BytesIO(text.encode()))


def report(options: argparse.Namespace, name: str, page: str, content: Any) -> None:
    """Print a page of tables, which says first if it is from a smoke run, and leave it as ``NAME.md`` in the output
    folder, beside all numbers as ``NAME.json``.
    """
    page = f"{NOTE}\n\n{page}" if options.smoke else page
    put(options.output / f"{name}.json", json.dumps(content, indent=1) + "\n")
    put(options.output / f"{name}.md", page + "\n")
    print(f"\n{page}\n\nWritten: {options.output / name}.md and .json")
