"""What works of all that transformers can build small: each architecture from a plan to generated tokens.

    python benchmarks/architectures.py --results FILE [--only gemma3_text opt] [--find]

Every causal and every masked language model of the installed transformers, random and small, is planned, applied,
reloaded by plain `from_pretrained` (`apply` has compared its logits), and asked for five tokens, or for a hidden one.
With --find its FFNs are only looked for. FILE keeps each finished row: a killed run goes on from it. A new release of
transformers is checked with this one command; the row of a model that was refused says why.
"""

import argparse
import json
import os
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from library.small_models import causal_types, masked_types, small_model

import ffncompress
from ffncompress.errors import FfncompressError
from ffncompress.models import find_ffns, find_model, load_tokenizer
from ffncompress.models.families import FAMILIES

WIDEST = 1024  # neurons; fits of more take minutes
IDS = torch.arange(5, 25)[None]
CAUSAL, MASKED = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM


def attempt(model_type: str, auto: type, tokenizer: object, find_only: bool) -> tuple[str, str]:
    """(what became of it, in which way)."""
    try:
        model = small_model(model_type, auto)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    try:
        found = find_ffns(model)
        if max(block.d_inner for block in found.blocks) > WIDEST:
            return "not built", f"its FFNs were not made small: {found.blocks[0].d_inner} neurons"
        told = f"{len(found.blocks)} blocks, {_described(found.blocks[0])}"
        told += "".join(f"; layer {layer}: {why}" for layer, why in list(found.kept.items())[:2])
        if not find_only:
            _whole_way(model, auto, tokenizer)
        return "works", told
    except FfncompressError as error:
        return "refused", str(error).split("; supported families")[0][:160]
    except Exception:
        return "CRASHED", traceback.format_exc().strip()[-300:]


def _described(block: object) -> str:
    layout = block.layout
    words = [" + ".join(layout.inner) + (f" (x{layout.fused})" if layout.fused > 1 else "") + f" > {layout.out}"]
    words += ["inline"] if layout.activation else []
    words += [f"behind {block.after_path.rpartition('.')[2]}"] if block.after_path else []
    words += [f"before {block.stream_path.rpartition('.')[2]}"] if block.stream_path else []
    words += ["linear maps only"] if block.tied else []
    words += [f"times {block.scale:.3g}"] if block.scale != 1 else []
    return ", ".join(words)


def _whole_way(model: torch.nn.Module, auto: type, tokenizer: object) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        base, plan, slim = (Path(scratch) / name for name in ("base", "plan", "slim"))
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
        ffncompress.plan(
            str(base), plan, blocks="0", budget="3x", tokens=1024, refit_tokens=512, seq_len=64, context=64
        )
        ffncompress.compress(plan, slim)
        again = auto.from_pretrained(slim).eval()
        if auto is CAUSAL:
            try:
                model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False)
            except Exception:  # it does not, as it is
                return
            written = again.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False)
            assert written.shape == (1, 25), written.shape
        else:
            assert again(IDS).logits.isfinite().all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--find", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    os.environ.setdefault("FFNCOMPRESS_CACHE", tempfile.mkdtemp())
    tokenizer = load_tokenizer(find_model("demo"))
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(5)
    rows = json.loads(options.results.read_text()) if options.results.exists() else {}
    causal = causal_types()
    todo = [(name, CAUSAL) for name in causal] + [(name, MASKED) for name in masked_types() if name not in causal]
    for name, auto in todo:
        if name in rows or (options.only and name not in options.only):
            continue
        rows[name] = attempt(name, auto, tokenizer, options.find)
        options.results.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{name}: {' | '.join(rows[name])}", flush=True)
    print(f"\ntransformers {transformers.__version__}: {dict(Counter(state for state, _ in rows.values()))}")
    print("\n| model type | in the table | | |\n| --- | --- | --- | --- |")
    for name, (state, told) in sorted(rows.items()):
        print(f"| {name} | {'yes' if name in FAMILIES else ''} | {state} | {told.replace('|', '/')} |")


if __name__ == "__main__":
    main()
