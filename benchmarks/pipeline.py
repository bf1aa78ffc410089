"""Plan, apply, eval and reload real models with the default settings, and print what came of it.

    python benchmarks/pipeline.py MODELS DATA [--only smollm2] [--out FOLDER]

MODELS holds `smollm2` and `stories15m` as Hugging Face folders; DATA holds `wikitext2/` and `domains/`. Fit, choose and
report are disjoint: WikiText-2 train, validation and test for smollm2; the three parts of stories.txt for stories15m.
web.txt is out of domain for both.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM

import ffncompress


def settings_for(name: str, data: Path) -> tuple[dict, dict]:
    """(plan settings, eval settings) of a model: only the texts, the rest is default."""
    web = str(data / "domains" / "web.txt")
    if name == "stories15m":
        return {"data": [str(data / "domains" / "stories.txt")]}, {"also": [web]}
    wiki = data / "wikitext2"
    plan = {"data": [str(wiki / "wiki.train.prefix.raw")], "choose_data": [str(wiki / "wiki.valid.raw")]}
    return plan, {"data": str(wiki / "wiki.test.raw"), "also": [web]}


def correlations(plan: ffncompress.Plan) -> dict[str, float]:
    """Spearman correlation of each candidate predictor with the measured swap delta-PPL, over all blocks."""
    measured = [b.swap.delta for b in plan.blocks]
    candidates = {
        "predicted cost": [b.swap.predicted_delta for b in plan.blocks],
        "1 - R2_lin": [1 - b.scores.r2_lin for b in plan.blocks],
        "unrecovered share of the stream": [b.scores.unrecovered_share for b in plan.blocks],
    }
    return {name: float(spearmanr(values, measured).statistic) for name, values in candidates.items()}


def report(name: str, folder: Path, data: Path, out: Path) -> None:
    plan_settings, eval_settings = settings_for(name, data)
    start = time.perf_counter()
    plan = ffncompress.plan(str(folder), out / f"{name}-plan", **plan_settings)
    planned = time.perf_counter()
    print(f"\n## {name}: {plan.summary}")
    print("block  R2_lin            median  eff.rank out  cond      unrecovered  predicted  swap delta-PPL    choice")
    for b in plan.blocks:
        s, w = b.scores, b.swap
        print(
            f"{b.index:5d}  {s.r2_lin:.3f} ± {s.r2_lin_error:.3f}  {s.r2_median_feature:7.3f}  "
            f"{s.effective_rank_output:12.1f}  {s.condition_number:.1e}  {s.unrecovered_share:11.4f}  "
            f"{w.predicted_delta:+9.2f}  {w.delta:+9.2f} ± {w.delta_error:.2f}  {'replace' if b.replace else 'keep'} "
            f"(tried {w.describe()}; becomes {b.choice.describe() if b.choice else 'itself'})"
        )
    print("joint checks:", [(len(c.blocks), round(c.delta, 3), round(c.delta_error, 3)) for c in plan.joint_checks])
    for predictor, value in correlations(plan).items():
        print(f"Spearman({predictor}, swap delta-PPL) = {value:+.3f} over {len(plan.blocks)} blocks")
    slim = out / f"{name}-slim"
    if not plan.replaced:  # show the pipeline all the same: the nearest miss, labelled as forced
        nearest = min(plan.blocks, key=lambda b: b.swap.delta).index
        print(f"the default plan is empty; below, block {nearest} is forced")
        plan = ffncompress.plan(str(folder), out / f"{name}-plan", blocks=str(nearest), overwrite=True, **plan_settings)
    applying = time.perf_counter()
    ffncompress.compress(out / f"{name}-plan", slim)
    applied = time.perf_counter()
    result = ffncompress.evaluate(slim, **eval_settings)
    for text in (result.main, *result.also):
        before, after = text.headline
        print(
            f"{Path(text.text).name} ({text.part}), {text.tokens:,} tokens, context {text.context}: "
            f"{before:.3f} to {after:.3f} ({100 * text.relative:+.2f} %); "
            f"word {text.base.word:.2f} to {text.slimmed.word:.2f}"
        )
    sizes = json.loads(result.model_dump_json())["sizes"]
    print("parameters:", {k: f"{a:,} to {b:,} ({100 * b / a:.1f} %)" for k, (a, b) in sizes.items()})
    print(f"gate {'passed' if result.passed else 'failed'} at {result.limit}")
    speed = result.speed
    print(
        f"speed: {speed.base:.0f} to {speed.slimmed:.0f} tokens/s, ratio {speed.ratio:.3f} (median of {speed.repeats})"
    )
    print(f"base    {result.continuation_base!r}\nslimmed {result.continuation_slimmed!r}")
    ids = torch.arange(3, 60)[None]
    with torch.inference_mode():
        same = torch.equal(AutoModelForCausalLM.from_pretrained(slim)(ids).logits, ffncompress.load(slim)(ids).logits)
    print(f"reload: plain from_pretrained gives {'equal' if same else 'OTHER'} logits")
    print(f"wall time: plan {planned - start:.0f} s, apply {applied - applying:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", choices=["smollm2", "stories15m"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in [options.only] if options.only else ["stories15m", "smollm2"]:
            report(name, options.models / name, options.data, options.out or Path(scratch))


if __name__ == "__main__":
    main()
