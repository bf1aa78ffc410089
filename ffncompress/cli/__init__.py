"""The command line: parses and prints. Everything heavy loads inside a command, so `--help` is quick."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import click

from ffncompress.cli.commands import INTERRUPTED, cli
from ffncompress.errors import FfncompressError

_FAILED = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 gate failed, 2 bad input, 130 interrupted."""
    _quieten()
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, prints no traceback for what a user can mend."""
    try:
        return int(cli.main(args=arguments, prog_name="ffncompress", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted; nothing half-written was left behind")
        return INTERRUPTED
    except FfncompressError as error:
        _say(str(error))
        return _FAILED
    except BrokenPipeError:  # `ffncompress show PLAN | head`
        sys.stderr.close()
        return 0


def _interrupt(number: int, _frame: object) -> None:
    """End like Ctrl-C: tidily; asked again, at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _say(message: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        click.echo(f"ffncompress: {message}", err=True)


def _quieten() -> None:
    """Third-party chatter off, before anything heavy is imported; a user's own settings win."""
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():  # no bar of anybody's in a log file
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
