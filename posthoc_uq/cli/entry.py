"""The group of commands."""

from __future__ import annotations

from typing import Any

import click

from posthoc_uq.cli import demo_command as demo
from posthoc_uq.cli import evaluate, fit, inspect, monitor, predict, serve, tune, update
from posthoc_uq.cli.console import usage_in_one_line


class _Commands(click.Group):
    """Commands in the order in which they are used; wrong usage is told in one line."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Read the group's own options."""
        with usage_in_one_line(info_name or ""):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        with usage_in_one_line(ctx.command_path):
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        import posthoc_uq

        click.echo(f"posthoc-uq {posthoc_uq.__version__}")
        ctx.exit()


@click.group(
    "posthoc-uq",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
)
def commands() -> None:
    """Honest uncertainty for a trained PyTorch model.

    `fit` a posterior over the weights and write it to a file, `tune` it on held-out data, `predict` a folder of images
    into a CSV with their uncertainty, `evaluate` how good that is, `update` it with new data or take some out again,
    `serve` predictions over HTTP, `monitor` what comes in, `inspect` a file without its model.

    \b
    Exit codes: 0 done, 1 error, 2 wrong usage, 3 predicted but for some unreadable images, 130 interrupted.
    """


for _command in (fit, tune, predict, evaluate, update, serve, monitor, inspect, demo):
    commands.add_command(_command.command)


def main(arguments: list[str] | None = None, **settings: Any) -> Any:
    """Run ``posthoc-uq`` with the given arguments, or the process's own."""
    return commands.main(arguments, prog_name="posthoc-uq", **settings)
