"""The `glm53-mono` command. A sub-command's module is imported when it is asked for, so none can break another."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup


@dataclass(frozen=True)
class SubCommand:
    """Where a sub-command's function lives."""

    module: str
    function: str


COMMANDS = {
    "doctor": SubCommand("glm53_mono.cli.doctor", "doctor"),
    "demo": SubCommand("glm53_mono.cli.demo", "demo"),
    "checkpoint": SubCommand("glm53_mono.cli.checkpoint", "checkpoint"),
    "bench": SubCommand("glm53_mono.cli.bench", "bench"),
    "isa": SubCommand("glm53_mono.cli.isa", "isa"),
    "diagnose": SubCommand("glm53_mono.cli.diagnose", "diagnose"),
    "soak": SubCommand("glm53_mono.cli.soak", "soak"),
}
"""Every sub-command, in the order of the help page."""


_UsageError = typer.BadParameter.__bases__[0]
"""Click's error for bad arguments: newer typer brings a click of its own and exports only this subclass."""


class LazyGroup(TyperGroup):
    """A command group that imports a sub-command's module only to run it or to describe it."""

    def main(self, *args: Any, standalone_mode: bool = True, **settings: Any) -> Any:
        """Run a command line; bad arguments get one line on stderr and exit status 2, where click prints its usage."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **settings)
        try:
            status = super().main(*args, standalone_mode=False, **settings)
        except _UsageError as error:
            _refuse(error)
        except typer.Abort:
            sys.exit(1)
        sys.exit(status or 0)

    def list_commands(self, ctx: Any) -> list[str]:
        """The names on the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, None where there is none; a broken module gives a command that says so."""
        if cmd_name not in COMMANDS:
            return None
        place = COMMANDS[cmd_name]
        try:
            function = getattr(importlib.import_module(place.module), place.function)
        except Exception as error:  # whatever a broken torch or SGLang raises on import, the other commands must run
            return _unavailable(cmd_name, f"{place.module} does not import: {type(error).__name__}: {error}")
        return _command(cmd_name, function)


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def _version(wanted: bool) -> None:
    if wanted:
        from glm53_mono import __version__

        typer.echo(f"glm53-mono {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """GLM-5.3-Flash decode and verify steps as one persistent kernel: an SGLang plugin."""


def _refuse(error: Any) -> NoReturn:
    said = error.format_message()
    if "\n" in said:
        # No arguments at all: the message is the help page.
        error.show()
    else:
        path = error.ctx.command_path
        print(f"{path}: {said.rstrip('.')}; see `{path} --help`", file=sys.stderr)
    sys.exit(2)


def _command(name: str, function: Callable[..., Any], **settings: Any) -> Any:
    """A function as a command of its own."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, **settings)(function)
    return typer.main.get_command(single)


def _unavailable(name: str, reason: str) -> Any:
    """A command that takes any arguments, says why it cannot run, and exits with status 1."""

    def report() -> None:
        print(f"glm53-mono {name}: {reason}", file=sys.stderr)
        raise typer.Exit(1)

    lenient = {"ignore_unknown_options": True, "allow_extra_args": True}
    return _command(name, report, context_settings=lenient, help=f"Unavailable: {reason}")
