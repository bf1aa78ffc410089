"""The ExecuTorch code of docs/serving.md, run on a checkpoint: exported, lowered, run, and compared with transformers.

    python benchmarks/executorch_check.py CHECKPOINT

Run it where executorch is installed; ffncompress need not be, for a checkpoint carries its loader.
"""

import argparse
import os
import re
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    checkpoint = parser.parse_args().checkpoint.resolve()
    shown = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    [code] = [block for block in shown if "import executorch" in block or "from executorch" in block]
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # the code calls the checkpoint slim, and writes slim.pte beside it
        Path("slim").symlink_to(checkpoint)
        exec(compile(code, str(PAGE), "exec"), {})


if __name__ == "__main__":
    main()
