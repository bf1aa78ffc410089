"""Damaged files by the thousand: plans, checkpoints, recipes, reports and texts, as a stranger may send them.

    python benchmarks/fuzz.py --count 100000 [--seed 0] [--kinds plans,configs] [--folder /dev/shm]

The same properties as tests/test_fuzz.py: every input is refused with a sentence of ours, read as what it is, or loads
with other answers that `verify` tells of; no file outside the output, no code, no traceback. Input `seed + i` of a
kind is the same wherever it runs: a violation is printed with the command that makes it again, and the exit code is 1.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SHARES = {  # of 1000; what needs no model run is cheap
    "configs": 5, "weights": 3, "moments": 2, "replacements": 5, "plans": 10, "sized-plans": 20, "gates": 20,
    "origins": 15, "carried-plans": 10, "tokenizers": 10, "studies": 200, "manifests": 120, "recipes": 280,
    "texts": 300,
}  # fmt: skip
LONGEST = 60  # seconds of one input


class Stuck(BaseException):
    """Nothing that the code under test could catch."""


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "FFNCOMPRESS_CACHE": f"{scratch}/cache",
            "TRANSFORMERS_VERBOSITY": "critical",
        }
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        from strangers import Bench, materials

        (Path(scratch) / "bench").mkdir()
        bench = Bench(Path(scratch) / "bench", *materials(Path(scratch)))
        kinds = arguments.kinds.split(",") if arguments.kinds else list(SHARES)
        whole = sum(SHARES[kind] for kind in kinds)
        violations = 0
        print("| kind | inputs | refused | as promised | other, and told | wrong | ms each |\n" + "| --- " * 7 + "|")
        for kind in kinds:
            count = max(1, round(arguments.count * SHARES[kind] / whole))
            violations += run_kind(bench, kind, arguments.seed, count)
        os.chdir("/")
    return 1 if violations else 0


def run_kind(bench: object, kind: str, seed: int, count: int) -> int:
    """Try so many inputs of one kind, print their row, and return how many went wrong."""
    from strangers import PROMISED, REFUSED, TOLD
    from watching import Wrong

    ended: Counter[str] = Counter()
    started = time.monotonic()
    signal.signal(signal.SIGALRM, _stop)
    for at in range(seed, seed + count):
        signal.alarm(LONGEST)
        try:
            ended[bench.once(kind, at)] += 1
        except (Wrong, Stuck) as error:
            ended["wrong"] += 1
            again = f"python benchmarks/fuzz.py --kinds {kind} --seed {at} --count 1"
            print(f"{again}: {str(error) or 'no end'}", file=sys.stderr, flush=True)
        finally:
            signal.alarm(0)
    took = 1000 * (time.monotonic() - started) / count
    cells = [kind, f"{count:,}", *(f"{ended[how]:,}" for how in (REFUSED, PROMISED, TOLD, "wrong")), f"{took:.1f}"]
    print(f"| {' | '.join(cells)} |", flush=True)
    return ended["wrong"]


def _stop(*_: object) -> None:
    raise Stuck


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="Inputs in all.")
    parser.add_argument("--seed", type=int, default=0, help="Of the first input of each kind.")
    parser.add_argument("--kinds", help=f"By commas, of: {', '.join(SHARES)}.")
    parser.add_argument("--folder", help="Where scratch files go.")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
