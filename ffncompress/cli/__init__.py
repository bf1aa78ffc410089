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
    """Run the command line and exit: 0 done, 1 gate failed, 2 bad input or a bug of ours, 130 interrupted."""
    _quieten()
    signal.signal(signal.SIGTERM, _interrupt)
    code = run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # Python would flush again as it ends, and turn any code into another
        from ffncompress.cli.console import stop_printing

        stop_printing()
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. 1 is the gate's verdict and nothing else."""
    try:
        return int(cli.main(args=arguments, prog_name="ffncompress", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted; nothing half-written was left behind")
        return INTERRUPTED
    except FfncompressError as error:
        _say(str(error))
    except BrokenPipeError:
        return 0
    except Exception as error:
        _say(_unforeseen(error))
    return _FAILED


def _unforeseen(error: Exception) -> str:
    """What nobody thought of, in a sentence; the traceback goes into a file, for whoever mends it."""
    from ffncompress.words import in_short

    where = write_traceback(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory; use fewer --tokens, a smaller model, or a larger machine (traceback: {where})"
    if isinstance(error, OSError):
        return f"{in_short(error)}; check the file, the disk and your rights (traceback: {where})"
    return f"a bug in ffncompress, not in what you did: {in_short(error)}; please report it with {where}"


def write_traceback(error: BaseException) -> str:
    """Keep a traceback in the user's cache, or where temporary files go; returns the file's name."""
    import tempfile
    import traceback
    from pathlib import Path

    from ffncompress.notebook import cache_folder

    text = "".join(traceback.format_exception(error))
    for folder in (cache_folder() / "bugs", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix="ffncompress-", suffix=".txt", dir=folder)
            with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as stream:
                stream.write(text)
            return name
        except OSError:
            continue
    return "no file, for none could be written"


def _interrupt(number: int, _frame: object) -> None:
    """End like Ctrl-C: tidily; asked again, at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _say(message: str) -> None:
    from ffncompress.words import plain

    if os.environ.get("RANK", "0") in ("0", "") or not os.environ["RANK"].isdecimal():
        click.echo(f"ffncompress: {plain(message)}", err=True)


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
