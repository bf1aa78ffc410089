"""The model card: front matter that the Hub reads, and a page that a person reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ffncompress.checkpoint.origin import CARD_FILE
from ffncompress.records.commands import plan_words, short_name
from ffncompress.records.origin import Origin
from ffncompress.records.task import AUTO_CLASSES, MEASURES, UNTIMED, Task
from ffncompress.sanitize import in_command, in_markdown, plain
from ffncompress.storage.files import write_file

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

    from ffncompress.records.gate import GateResult, TextResult
    from ffncompress.records.plan import Plan
    from ffncompress.storage.manifest import Manifest

_TASKS: dict[Task, str] = {"causal": "text-generation", "masked": "fill-mask", "embedding": "feature-extraction"}


def write_card(
    directory: Path,
    plan: Plan,
    origin: Origin,
    gate: GateResult | None = None,
    repo: str = "THIS/FOLDER",
    *,
    manifest: Manifest | None = None,
) -> list[str]:
    """Write README.md into a checkpoint folder; with a gate result it carries the evaluation too.

    Args:
        directory: the checkpoint.
        plan: what it was made from.
        origin: where it came from.
        gate: how it fared, if it is known.
        repo: what it is loaded by.
        manifest: as the folder was written; a card that somebody has edited since is left alone.

    Returns:
        The names of the files that were written.
    """
    from huggingface_hub import ModelCard

    if manifest is not None and manifest.changes(directory, [CARD_FILE]):
        return []
    front = _front_matter(plan, origin, gate).to_yaml()
    card = ModelCard(f"---\n{front}\n---\n\n{_body(plan, origin, gate, repo)}")
    write_file(directory / CARD_FILE, str(card))
    return [CARD_FILE]


def _front_matter(plan: Plan, origin: Origin, gate: GateResult | None) -> ModelCardData:
    from huggingface_hub import ModelCardData

    return ModelCardData(
        library_name="transformers",
        pipeline_tag=_TASKS[plan.base.task],
        license=origin.base_licence,
        base_model=plan.base.name if origin.base_is_hub else None,
        base_model_relation="quantized" if origin.base_is_hub else None,  # the Hub's word for a slimmed copy
        tags=["ffncompress", "compression", "feed-forward-replacement"],
        model_name=f"{plain(short_name(plan))}, slimmed" if gate else None,
        eval_results=_eval_results(gate) if gate else None,
    )


def _eval_results(gate: GateResult) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    def results(text: TextResult) -> list[EvalResult]:
        values = {"token": text.slimmed.token, "word": text.slimmed.word, "byte": text.slimmed.byte}
        return [
            EvalResult(
                task_type=_TASKS[gate.task],
                dataset_type="text",
                dataset_name=plain(f"{Path(text.text).name} ({text.part} part)"),
                metric_type=MEASURES[gate.task],
                metric_name=f"{unit} {MEASURES[gate.task]}, context {text.context}",
                metric_value=round(value, 4),
            )
            for unit, value in values.items()
            if value is not None
        ]

    accuracies = [
        EvalResult(
            task_type=_TASKS[gate.task], dataset_type=plain(task.task), dataset_name=plain(task.task),
            metric_type=plain(task.metric), metric_name=f"{plain(task.metric)}, {task.examples} examples",
            metric_value=round(task.slimmed, 4),
        )
        for task in gate.tasks
    ]  # fmt: skip
    return [*(result for text in (gate.main, *gate.also) for result in results(text)), *accuracies]


def _body(plan: Plan, origin: Origin, gate: GateResult | None, repo: str) -> str:
    ratios = plan.ratios
    count, kind = len(plan.replaced), AUTO_CLASSES[plan.base.task]
    trained = "" if _healing(origin) else "; nothing was trained"
    sections = [
        f"# {in_markdown(short_name(plan))}, slimmed by ffncompress",
        f"{count} of {len(plan.blocks)} feed-forward blocks are replaced by smaller closed-form ones{trained}. "
        f"The whole model keeps {100 * ratios['whole_model']:.1f} % of its parameters "
        f"({origin.parameters_before:,} to {origin.parameters_after:,}), all FFNs "
        f"{100 * ratios['all_ffns']:.1f} %, the replaced FFNs {100 * ratios['replaced_ffns']:.1f} %.",
        "## How to load",
        *([] if plan.native else ["```\npip install ffncompress\n```"]),
        f"```python\nfrom transformers import {kind}, AutoTokenizer\n\n"
        f'model = {kind}.from_pretrained("{repo}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}")\n```',
        "It is a stock checkpoint of its family, all of its layers narrower alike: nothing else needs to be installed."
        if plan.native
        else "No import of ffncompress is needed, but it must be installed; or pass `trust_remote_code=True`, which "
        "runs the loader in this repository, `modeling_ffncompress.py`. Without either, loading stops and says so.",
        "## What it costs",
        _gate_table(gate) if gate else "Not evaluated yet: run `ffncompress eval` on this folder.",
        "## Blocks",
        _block_table(plan),
        "R2_lin is the held-out variance of a block's output that the least-squares linear map of its input explains. "
        f"Swap is the {MEASURES[plan.base.task]} that its best replacement at the budget's factor "
        "(8x where none is named) adds alone, "
        "on text that nothing was fitted on. Kept neurons have their output matrix refitted by least squares.",
        *_healing(origin),
        "## How to reproduce",
        f"```\n{reproduce_command(plan)}\n{_apply_command(origin)}\nffncompress eval OUT\n```",
        f"Made with ffncompress {in_markdown(plan.ffncompress_version)}; base revision "
        f"{in_markdown(plan.base.revision or 'local folder')}, sha256 {in_markdown(plan.base.fingerprint[:16])}. "
        "Text fingerprints and "
        "every measurement are in `ffncompress/plan.json`.",
    ]
    return "\n\n".join(sections) + "\n"


def _healing(origin: Origin) -> list[str]:
    """What training did, where there was any."""
    healing = origin.healing
    if not healing or not healing.kept:
        return []
    pace = f", {healing.pace:,.0f} a second, at a rate of {healing.rate:g}" if healing.pace and healing.rate else ""
    return [
        f"After the closed-form replacement, {healing.moved} were distilled from the original for "
        f"{healing.minutes:g} minutes ({healing.steps:,} steps, {healing.tokens:,} tokens{pace}): "
        f"perplexity {healing.closed_form:.2f} to {healing.healed:.2f} "
        f"on the choose text (original {healing.original:.2f})."
    ]


def _apply_command(origin: Origin) -> str:
    healing = origin.healing
    asked = f" --heal {healing.minutes:g} --heal-what {healing.what}" if healing else ""
    return f"ffncompress apply PLAN -o OUT{asked}"


def reproduce_command(plan: Plan) -> str:
    """The command that makes the plan, without anybody's folders in it."""
    return " ".join(in_command(word) for word in plan_words(plan))


def _gate_table(gate: GateResult) -> str:
    rows = [
        f"| text | context | tokens | {MEASURES[gate.task]} | base | slimmed | change |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for text in (gate.main, *gate.also):
        for unit in ("token", "word", "byte"):
            before, after = getattr(text.base, unit), getattr(text.slimmed, unit)
            if before is None:
                continue
            name = in_markdown(f"{Path(text.text).name} ({text.part})")
            rows.append(
                f"| {name} | {text.context} | {text.tokens:,} | {unit} | {before:.3f} | {after:.3f} | "
                f"{after - before:+.3f} ({100 * (after / before - 1):+.2f} %) |"
            )
    rows += _agreement_lines(gate)
    rows += _task_table(gate)
    verdict = "passed" if gate.passed else "FAILED"
    rows.append(f"\nGate: {verdict} (limit {in_markdown(gate.limit)}).")
    rows += _speed_table(gate)
    if gate.limit_warning:
        rows.append(f"\nOf the limit: {gate.limit_warning}.")
    return "\n".join(rows)


def _speed_table(gate: GateResult) -> list[str]:
    """Both models in turns, and the ratio that products of matrices, or bytes of weights, predict."""
    if gate.speed is None:
        return [f"\nIts {UNTIMED}."]
    where = in_markdown(gate.speed.device)
    rows = [f"\n| tokens/s, {where} | base | slimmed | ratio | predicted |", "| --- | --- | --- | --- | --- |"]
    return rows + [
        f"| {in_markdown(pace.what)} | {pace.base:,.0f} | {pace.slimmed:,.0f} | {pace.measured} | {pace.expected} |"
        for pace in gate.paces
    ]


def _agreement_lines(gate: GateResult) -> list[str]:
    found = [(in_markdown(Path(text.text).name), text.agreement) for text in (gate.main, *gate.also)]
    return [
        f"\nOn {name}, both models hold the same token for the likeliest at {100 * alike.same_top:.1f} % of places; "
        f"KL(base || slimmed) is {alike.kl:.4f} nats per token."
        for name, alike in found
        if alike
    ]


def _task_table(gate: GateResult) -> list[str]:
    """Accuracies with their standard errors; that of the change is of paired examples."""
    if not gate.tasks:
        return []

    def spread(error: float | None) -> str:
        return "" if error is None else f" ± {100 * error:.1f}"

    rows = ["\n| task | examples | majority | base | slimmed | change |", "| --- | --- | --- | --- | --- | --- |"]
    for task in gate.tasks:
        majority = "-" if task.majority is None else f"{100 * task.majority:.1f} %"
        rows.append(
            f"| {in_markdown(task.task)} ({in_markdown(task.metric)}) | {task.examples:,} | {majority} | "
            f"{100 * task.base:.1f}{spread(task.base_error)} % | "
            f"{100 * task.slimmed:.1f}{spread(task.slimmed_error)} % | "
            f"{-100 * task.drop:+.1f}{spread(task.drop_error)} |"
        )
    return rows


def _block_table(plan: Plan) -> str:
    rows = ["| block | R2_lin | median feature | swap | treated as |", "| --- | --- | --- | --- | --- |"]
    for block in plan.blocks:
        swap, choice = block.swap, block.choice
        kind = f"{choice.describe()} ({choice.kind})" if choice else "kept"
        rows.append(
            f"| {block.index} | {block.scores.r2_lin:.3f} ± {block.scores.r2_lin_error:.3f} | "
            f"{block.scores.r2_median_feature:.3f} | {swap.delta:+.2f} | {kind} |"
        )
    return "\n".join(rows)
