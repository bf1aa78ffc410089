"""The command line: parses and prints. Everything heavy loads inside a command, so `--help` is quick."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

import click

from ffncompress.cli.commands import cli
from ffncompress.cli.options import INTERRUPTED
from ffncompress.errors import FfncompressError, ProcessError
from ffncompress.runtime.launch import processes, rank

_FAILED = 2
_TURN = 3.0  # seconds that a process waits for another to speak
_GRACE = 10.0  # seconds that a process has to end by itself when its launcher asks it to


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 gate failed, 2 bad input or a bug of ours, 130 interrupted.

    The exit code of torchrun is its own: 1 whenever a process of its did not end with 0.
    """
    _quieten(bars=sys.stderr.isatty() and "--quiet" not in (sys.argv[1:] if arguments is None else arguments))
    signal.signal(signal.SIGTERM, _interrupt)
    if processes() > 1 and os.name == "posix":
        _end_even_if_stuck()
    code = run(arguments)
    if code == 0 and "torch" in sys.modules:
        from ffncompress.runtime.workers import leave

        leave()
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
        if _is_to_speak():
            error.show()
    except (KeyboardInterrupt, click.Abort) as error:
        asked = str(error.__cause__ or error)  # by the launcher, which click's own kind does not tell
        _say(asked or "interrupted; nothing half-written was left behind")
        return _FAILED if asked else INTERRUPTED
    except FfncompressError as error:
        _say(str(error))
    except BrokenPipeError:
        return 0
    except Exception as error:
        _say(_unforeseen(error))
    return _FAILED


def _unforeseen(error: Exception) -> str:
    """What nobody thought of, in a sentence; the traceback goes into a file, for whoever mends it."""
    from ffncompress.sanitize import in_short

    where = write_traceback(error)
    if _is_of_memory(error):
        return f"out of memory; use fewer --tokens, a smaller model, or a larger machine (traceback: {where})"
    if isinstance(error, OSError):
        return f"{in_short(error)}; check the file, the disk and your rights (traceback: {where})"
    return f"a bug in ffncompress, not in what you did: {in_short(error)}; please report it with {where}"


def _is_of_memory(error: Exception) -> bool:
    """Whether memory ran out, by torch's word too where it is loaded."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from ffncompress.runtime.memory import ran_out

    return ran_out(error)


def write_traceback(error: BaseException) -> str:
    """Keep a traceback in the user's cache, or where temporary files go; returns the file's name."""
    import tempfile
    import traceback
    from pathlib import Path

    from ffncompress.storage.registry import cache_folder

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
    """End like Ctrl-C: tidily; asked again, at once. A launcher asks when another process of the run has ended."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt(str(ProcessError()) if processes() > 1 else "")


def _end_even_if_stuck() -> None:
    """Make sure that a process ends when its launcher asks it to.

    Python looks at signals between two steps of its own, and a process that waits for one that is gone takes no step.
    """
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)

    def listen() -> None:
        while os.read(ear, 1)[0] != signal.SIGTERM:
            pass
        time.sleep(_GRACE)
        _say(str(ProcessError()))
        os._exit(_FAILED)

    threading.Thread(target=listen, daemon=True).start()


def _say(message: str) -> None:
    """Say why this process ends; of several, one does."""
    from ffncompress.sanitize import plain

    if _is_to_speak():
        who = f" (process {rank()})" if processes() > 1 and rank() > 0 else ""
        click.echo(f"ffncompress{who}: {plain(message)}", err=True)


def _is_to_speak() -> bool:
    """Whether it is this process's to say why the run ends: of several, whichever meets the trouble first.

    The others fall with it, or meet the same.
    """
    if processes() == 1:
        return True
    itself = threading.current_thread() is threading.main_thread()
    if itself:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends anyway, and is to be heard first
    if "torch" in sys.modules:
        from ffncompress.runtime.workers import first_to_speak

        first = first_to_speak()
    else:
        first = rank() == 0  # nothing was done yet but to read what was typed, which is the same for all
    if itself and not first:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_TURN)  # or the launcher, seeing it end, would end the one that speaks
    return first


def _quieten(bars: bool = False) -> None:
    """Third-party chatter off, before anything heavy is imported, and its bars; a user's own settings win."""
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not bars:  # no bar of anybody's in a log file
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # where torchao is installed, transformers imports it; accelerate tells of weights that are on disk
    for name in ("torch.utils._pytree", "torchao", "accelerate.big_modeling"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    own = logging.getLogger("ffncompress")
    own.setLevel(logging.INFO)
    own.handlers, own.propagate = [_Telling()], False


class _Telling(logging.Handler):
    """What is worth a line of a run that goes on."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"ffncompress: {record.getMessage()}", err=True)
