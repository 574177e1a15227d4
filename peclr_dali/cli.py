"""The commands.

Each command imports the code that it calls only when it runs, so that `--help` is fast. A program that calls `main`
itself needs the usual `if __name__ == "__main__"`, since `check-data` starts a process.
"""

import itertools
import logging
import os
import sys
from contextlib import suppress
from typing import Any

import click

from peclr_dali import __version__
from peclr_dali.bench import commands as measurements
from peclr_dali.train.commands import data, trained, training
from peclr_dali.train.commands.failures import failures
from peclr_dali.train.commands.options import CALL, as_called

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
