"""The commands, and what becomes of their errors: one line on the terminal and an exit code.

Each command imports the code that it calls only when it runs, so that `--help` is fast. A program that calls `main`
itself needs the usual `if __name__ == "__main__"`, since `check-data` starts a process.
"""

import errno
import itertools
import logging
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import click

from peclr_dali import __version__
from peclr_dali.bench import commands as measurements
from peclr_dali.errors import UserError
from peclr_dali.train.commands import data, trained, training
from peclr_dali.train.commands.options import CALL, as_called, say
from peclr_dali.train.distributed.interrupt import Interrupted

COMMANDS: dict[str, list[click.Command]] = {
    title: [command for command in vars(module).values() if isinstance(command, click.Command)]
    for title, module in {
        "Data": data,
        "Training": training,
        "Trained networks": trained,
        "Measurements": measurements,
    }.items()
}
"""The commands by their group in the help."""


def fail(line: str, exit_code: int = 2) -> NoReturn:
    """Print a message as one line, with the rank in front if there are several, and exit with a code."""
    rank, line = os.environ.get("RANK"), " ".join(line.split())
    say(line if rank is None else f"rank {rank} on {platform.node()}: {line}", err=True)
    raise click.exceptions.Exit(exit_code)


@contextmanager
def failures() -> Iterator[None]:
    """End with one line and an exit code on errors that a user can mend, and on requests to stop."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError as request:
        click.echo(request.format_message())
        raise click.exceptions.Exit from request
    except click.UsageError as error:
        fail(f"error: {error.format_message()} See '{error.ctx.command_path if error.ctx else CALL} --help'.")
    except UserError as error:
        fail(f"error: {error}", error.exit_code)
    except Interrupted as stop:
        fail(str(stop), stop.exit_code)
    except KeyboardInterrupt:
        fail("aborted", 130)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("peclr_dali"):
            raise
        remedy = (
            "\"pip install '.[all]' torch==X\", with the torch that you have, installs what all commands need, or use "
            ".venv/bin/python of 'make setup'"
        )
        fail(f"error: {error}. In the checkout, {remedy}")
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        place = os.fsdecode(error.filename or "the output")
        fail(f"error: {place}: {error.strerror}. Check the path, its permissions and the disk")


class Commands(click.Group):
    """The commands in groups, each with the first sentence of its help. Of their errors see `failures`."""

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
    if not isinstance(end, SystemExit):
        sys.excepthook(type(end), end, end.__traceback__)  # torch's, which names the rank in each line
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(int(end.code or 0) if isinstance(end, SystemExit) else 1)


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
