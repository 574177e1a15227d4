"""Command line, run as `python cli.py COMMAND`, or under `torchrun` for several processes.

Each command is defined beside the code that it calls, and imports that code only when it runs, so that `--help` is
fast.
"""

from __future__ import annotations

import io
import logging
import os
import platform
import signal
import sys
from typing import Any

# Ctrl-C during the imports below ends the process without a traceback. If it is ignored, as for background jobs, it
# stays ignored.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import click

import bench.classification.command
import bench.commands
import experiments.commands
import train.commands.data
import train.commands.networks
import train.commands.training
from errors import ToldByAnother, UserError
from errors.refused import may_pass, of_machine
from errors.terminal import OneLine
from machine.compiled import choose_cache_folder
from machine.freed_memory import keep_freed_memory
from train.commands.options import is_first_on_host, is_main_rank, say
from train.distributed import restarts
from train.distributed.interrupt import Interrupted


class OneLineErrors(click.Group):
    """Turns errors into one line and exit code 2. An interrupted run prints where it stopped."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command that the arguments name."""
        if restarts.refused_before():
            sys.exit(2)
        choose_cache_folder()
        keep_freed_memory()
        if logging.lastResort is not None:  # this handler prints the warnings of commands that configure no log
            logging.lastResort.setFormatter(OneLine("%(message)s"))
        if isinstance(sys.stdout, io.TextIOWrapper):  # file names need not be UTF-8
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            _check_environment()
            super().main(*args, **{"prog_name": "cli.py", **kwargs, "standalone_mode": False})
        except ToldByAnother as error:
            _leave_in_silence(restart=may_pass(error))
        except UserError as error:
            _fail(str(error), restart=may_pass(error))
        except Interrupted as stop:
            if is_main_rank():
                say(str(stop), err=True)
            sys.exit(stop.exit_code)
        except click.exceptions.NoArgsIsHelpError as request:
            click.echo(request.format_message())
        except click.UsageError as error:
            words = error.ctx.command_path.split()[1:] if error.ctx is not None else []
            see = f"See '{' '.join(['python cli.py', *words, '--help'])}'."
            _fail(f"{error.format_message()}{_hint(error)} {see}", on_every_rank=True)
        except click.ClickException as error:
            _fail(error.format_message(), on_every_rank=True)
        except (click.Abort, KeyboardInterrupt):
            click.echo("aborted", err=True)
            sys.exit(130)
        except Exception as error:
            message = of_machine(error)
            if message is None:  # a bug of ours
                raise
            _fail(message, restart=may_pass(error))
        sys.exit(0)


def _fail(message: str, *, on_every_rank: bool = False, restart: bool = False) -> None:
    if on_every_rank and not is_first_on_host():
        _leave_in_silence()
    prefix = "error" if is_main_rank() else f"rank {os.environ['RANK']} on {platform.node()}: error"
    say(f"{prefix}: {' '.join(_shortened(word) for word in message.split())}", err=True)
    restarts.reported(restart=restart)
    sys.exit(2)


def _check_environment() -> None:
    """Refuse a value that makes the import of Numba fail with a traceback."""
    threads = os.environ.get("NUMBA_NUM_THREADS", "1")
    if not threads.isdecimal() or int(threads) < 1:
        raise UserError(f"NUMBA_NUM_THREADS = {threads!r} in the environment: expected a number above 0. Unset it.")


def _shortened(word: str) -> str:
    """Cut the middle out of a word that is longer than any sensible path."""
    return word if len(word) <= 500 else f"{word[:200]}...{word[-100:]} ({len(word)} characters)"


def _hint(error: click.UsageError) -> str:
    """A hint for options and arguments that click does not know."""
    if isinstance(error, click.NoSuchOption):
        if error.ctx is not None and error.ctx.parent is None:
            return " Options come after the command."
        if "." in error.option_name:
            return f" A key of the configuration is set by --set {error.option_name.lstrip('-')}=VALUE."
    elif "unexpected extra argument" in error.message:
        return ": an option takes one value; repeat -c and --set for more, and put a value with spaces in quotes."
    return ""


def _leave_in_silence(*, restart: bool = False) -> None:
    restarts.wait_for_report()
    restarts.reported(restart=restart)
    sys.exit(2)


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Pre-train pose encoders on unlabelled images: PeCLR on NVIDIA DALI.

    A first try, in minutes and without a GPU:

    \b
      python cli.py make-data .data/hands --poses 800
      python cli.py pretrain -c configs/demo.toml

    Your own images, on a GPU:

    \b
      python cli.py pretrain -c configs/peclr_rn50.toml -c configs/rtx_11gb.toml \\
          --set data.source=folder --set data.root=/path/to/images
    """


commands = (
    bench.commands,
    bench.classification.command,
    experiments.commands,
    train.commands.data,
    train.commands.networks,
    train.commands.training,
)
for module in commands:
    for command in vars(module).values():
        if isinstance(command, click.Command):
            main.add_command(command)

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
