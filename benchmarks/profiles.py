"""The study of smollm2, stories15m and the embedded model, each with everything, as Markdown.

    python benchmarks/profiles.py MODELS DATA OUT [--only demo] [--no-cross-feed]

A report folder for each lands in OUT. smollm2 is profiled on WikiText-2 train, web pages and books; stories15m on
stories, and web and books, which it never saw; the embedded model on python-docs, web and books. Each stage's time
stands beside one forward pass over the same tokens in the same process.
"""

import argparse
from pathlib import Path

from ffncompress import profile
from ffncompress.profiling.records import Profile, Study

FIRST_TEXT = {
    "demo": "python-docs",
    "stories15m": "domains/stories.txt",
    "smollm2": "wikitext2/wiki.train.prefix.raw",
}


def table(found: Profile) -> str:
    lines = ["| block | R2_lin (95 %) | median | ranks i/o/m | part. i/o | cond | range | swap | probe | regime |"]
    lines.append("| --- " * 10 + "|")
    for block in found.blocks:
        s, swap, probe = block.scores, block.swap, block.probe
        ranks = f"{s.effective_rank_input:.0f}/{s.effective_rank_output:.0f}/{s.effective_rank_map:.0f}"
        cells = [
            str(block.index), f"{s.r2_lin:.3f} ± {1.96 * s.r2_lin_error:.3f}", f"{s.r2_median_feature:.3f}", ranks,
            f"{s.participation_input:.0f}/{s.participation_output:.0f}", f"{s.condition_number:.1e}",
            f"{s.dynamic_range:.1e}", f"{swap.delta:+.2f} ± {swap.error:.2f}" if swap else "",
            f"{probe.gain:+.3f} ± {1.96 * probe.gain_error:.3f}" if probe else "", block.regime,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def story(study: Study) -> str:
    """One study as Markdown."""
    first = study.trained[0]
    parts = [f"### {first.name}: {first.provenance}; base perplexity {first.base_perplexity:.2f}", table(first)]
    sentences = []
    for found in study.trained:
        if found.probe:
            r = "" if found.probe.correlation is None else f", r with 1 - R2_lin {found.probe.correlation:+.2f}"
            sentences.append(
                f"probe on {Path(found.text).name}: median gain {found.probe.median_gain:.3f}, largest "
                f"{found.probe.largest_gain:.3f}{r}"
            )
    for pitfall in study.pitfalls:
        ways = ", ".join(f"{t.optimiser} {t.r2[-1]:.3f}" for t in pitfall.trained)
        sentences.append(
            f"pitfall, block {pitfall.block} (condition number {pitfall.condition_number:.1e}): closed form "
            f"{pitfall.closed_form:.3f}, {ways}"
        )
    sentences += [f"{Path(a.model).name}: {a.verdict}" for a in study.agreements] + study.learned
    sentences += [f"{feed.model} on {feed.giver}'s activations: {feed.verdict}" for feed in study.cross_feeds]
    stages = ["| stage | seconds | forward passes |", "| --- | --- | --- |"]
    for took in study.stages:
        stages.append(f"| {took.name} | {took.seconds:.1f} | {'' if took.ratio is None else f'{took.ratio:.2f}'} |")
    return "\n\n".join([*parts, "\n".join(f"- {each}" for each in sentences), "\n".join(stages)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("models", "data", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--only", choices=list(FIRST_TEXT))
    parser.add_argument("--no-cross-feed", action="store_true", help="twice as quick")
    options = parser.parse_args()
    for name in [options.only] if options.only else FIRST_TEXT:
        first = FIRST_TEXT[name]
        texts = [first if name == "demo" else str(options.data / first)]
        texts += [str(options.data / "domains" / text) for text in ("web.txt", "books.txt")]
        study = profile(
            name if name == "demo" else str(options.models / name), options.out / name, overwrite=True, data=texts,
            probe=True, pitfall="worst", against_random=True, cross_feed=not options.no_cross_feed,
        )  # fmt: skip
        print(f"\n{story(study)}", flush=True)


if __name__ == "__main__":
    main()
