"""The commands, and what becomes of their errors: one line on the terminal and an exit code.

Each command imports the code that it calls only when it runs, so that `--help` is fast. A program that calls `main`
itself needs the usual `if __name__ == "__main__"`, since `check-data` starts a process.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from peclr_dali import __version__
from peclr_dali.bench import commands as measurements
from peclr_dali.errors import UserError
from peclr_dali.train.commands import data, evaluate, predict, report, training, weights
from peclr_dali.train.commands.options import CALL, as_called, say
from peclr_dali.train.distributed.interrupt import Interrupted

COMMANDS: dict[str, list[click.Command]] = {
    title: [command for module in modules for command in vars(module).values() if isinstance(command, click.Command)]
    for title, modules in {
        "Data": (data,),
        "Training": (training,),
        "Trained networks": (evaluate, predict, report, weights),
        "Measurements": (measurements,),
    }.items()
}
"""The commands by their group in the help."""


class Failure(click.ClickException):
    """What click prints as one line, with the rank in front if there are several, before it exits with a code."""

    def __init__(self, line: str, exit_code: int = 2) -> None:
        super().__init__(" ".join(line.split()))
        self.exit_code = exit_code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        """Print the line to stderr."""
        rank = os.environ.get("RANK")
        say(self.message if rank is None else f"rank {rank} on {platform.node()}: {self.message}", err=True)


@contextmanager
def failures() -> Iterator[None]:
    """Raise errors that a user can mend, and requests to stop, as a `Failure`. Others keep their traceback."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError as request:
        click.echo(request.format_message())
        raise click.exceptions.Exit from request
    except click.UsageError as error:
        command = CALL if error.ctx is None else error.ctx.command_path
        raise Failure(f"error: {error.format_message()} See '{command} --help'.") from error
    except UserError as error:
        raise Failure(f"error: {error}", error.exit_code) from error
    except Interrupted as stop:
        raise Failure(str(stop), stop.exit_code) from stop
    except KeyboardInterrupt as stop:
        raise Failure("aborted", 130) from stop
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("peclr_dali"):
            raise
        remedy = "\"pip install '.[all]'\" installs what all commands need, or use .venv/bin/python of 'make setup'"
        raise Failure(f"error: {error}. In the checkout, {remedy}") from error
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        place = os.fsdecode(error.filename or "the output")
        raise Failure(f"error: {place}: {error.strerror}. Check the path, its permissions and the disk") from error


class Commands(click.Group):
    """The commands in groups, each with the first sentence of its help. Their errors become a `Failure`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by group."""
        for title, commands in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(command.name or "", command.get_short_help_str(200)) for command in commands])

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the options before the command's name."""
        with failures():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with failures():
            return super().invoke(ctx)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command that the arguments name, and exit."""
        try:
            super().main(*args, **{"prog_name": CALL, **kwargs})
        except BaseException as end:
            distributed = sys.modules.get("torch.distributed")
            if distributed is not None and distributed.is_available() and distributed.is_initialized():
                _end_joined_rank(end)
            raise


def _end_joined_rank(end: BaseException) -> None:
    """End this process at once. Python's own steps would wait for threads of NCCL, which may wait for a lost rank."""
    code = 1
    if isinstance(end, SystemExit):
        code = int(end.code or 0)
    else:
        sys.excepthook(type(end), end, end.__traceback__)  # torch's, which names the rank in each line
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="peclr-dali %(version)s")
def main() -> None:
    """Pre-train pose encoders on unlabelled images: PeCLR on NVIDIA DALI.

    A first try, in minutes and without a GPU:

    \b
      python cli.py make-data .data/hands --poses 800
      python cli.py pretrain -c configs/demo.toml

    Your own images, on a GPU:

    \b
      python cli.py pretrain -c configs/peclr_rn50.toml -c configs/cards/rtx_11gb.toml \\
          --set data.source=folder --set data.root=/path/to/images
    """
    from peclr_dali.train.runs.log import configure_logging

    configure_logging()


main.help = as_called(main.help or "")
for command in itertools.chain(*COMMANDS.values()):
    command.help = as_called(command.help or "")
    main.add_command(command)
