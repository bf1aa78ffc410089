"""Python in a process of its own, as a stranger starts it."""

from __future__ import annotations

import os
import subprocess
import sys

LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({folder!r})
with torch.inference_mode():
    print("SUM", model(torch.arange(5, 25)[None]).logits.double().sum().item())
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
