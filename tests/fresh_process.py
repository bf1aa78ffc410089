"""Python in a process of its own, as a stranger starts it, but for the seconds that its imports take.

One process imports what every case imports, and forks for each of them: a case sees what it would see had it begun
with these imports itself. What is read when they are imported is read once, so each such environment has its own.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({folder!r})
with torch.inference_mode():
    print("SUM", model(torch.arange(5, 25)[None]).logits.double().sum().item())
"""
OURS = "from ffncompress import cli\ncli._quieten()\nimport accelerate, matplotlib.figure, ffncompress.api"
COMMAND = "import runpy\nrunpy.run_module('ffncompress', run_name='__main__', alter_sys=True)\n"

# The child leaves the loop and runs the case as the interpreter runs any other: its errors, its exit and its code.
_SERVER = """
import json, os, signal, sys
{imports}
import torch, transformers.models.auto.modeling_auto, transformers.modeling_utils
for line in sys.stdin:
    case = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print("pid", child, flush=True)
    print("code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.environ.clear()
os.environ.update(case["environment"])
os.chdir(case["folder"])
for at, name in enumerate((os.devnull, case["out"], case["err"])):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), at)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite run in the background ignores it
sys.argv = ["-c", *case["arguments"]]
exec(compile(case["code"], "<string>", "exec"), {{"__name__": "__main__"}})
"""


@dataclass
class Started:
    """A process that runs."""

    pid: int
    _server: subprocess.Popen[str]
    _said: tempfile.TemporaryDirectory[str]

    def wait(self) -> subprocess.CompletedProcess[str]:
        code = _told(self._server, "code")
        out, err = ((Path(self._said.name) / name).read_text() for name in ("out", "err"))
        self._said.cleanup()
        return subprocess.CompletedProcess([], code, out, err)


def start_python(
    code: str, *arguments: str | Path, imports: str = "", folder: Path | str = ".", **environment: str
) -> Started:
    """Begin to run code where torch and transformers are imported; one at a time of each environment."""
    everything = {**os.environ, **environment}
    decisive = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET")
    server = _server(imports, tuple((name, everything.get(name)) for name in decisive))
    said = tempfile.TemporaryDirectory()
    case = {"code": code, "arguments": list(map(str, arguments)), "folder": str(Path(folder).resolve())}
    case |= {"environment": everything, "out": f"{said.name}/out", "err": f"{said.name}/err"}
    server.stdin.write(json.dumps(case) + "\n")
    server.stdin.flush()
    return Started(_told(server, "pid"), server, said)


def run_python(code: str, *arguments: str | Path, **options: str | Path) -> subprocess.CompletedProcess[str]:
    return start_python(code, *arguments, **options).wait()


@functools.cache
def _server(imports: str, decisive: tuple[tuple[str, str | None], ...]) -> subprocess.Popen[str]:
    environment = {**os.environ, **dict(decisive)}
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER.format(imports=imports)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={name: value for name, value in environment.items() if value is not None},
    )  # fmt: skip
    atexit.register(_end, server)
    return server


def _told(server: subprocess.Popen[str], what: str) -> int:
    """What a server says next of that kind; a case that nobody waited for may have left words of another."""
    return next(int(line.split()[1]) for line in server.stdout if line.startswith(what))


def _end(server: subprocess.Popen[str]) -> None:
    """It ends when its input does, unless a case of its hangs."""
    server.stdin.close()
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
