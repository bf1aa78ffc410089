"""The passes over a model that look at blocks one by one: each gets its scores, a menu, and a swap that was tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ffncompress.calibration import BlockMoments, check_enough_rows, collect_moments, in_passes
from ffncompress.corpus import VERIFY_WINDOWS, Corpus, gather_text
from ffncompress.doubts import Measured, doubt_of_base, doubt_of_slimmed, refuse
from ffncompress.errors import BudgetError
from ffncompress.forecast import loss_metrics, predict_losses
from ffncompress.latency import time_blocks
from ffncompress.models import (
    Block,
    ModelSource,
    context_of,
    count_parameters,
    find_blocks,
    installed,
    load_model,
    load_tokenizer,
)
from ffncompress.plans import JointCheck, Option, Scores, Swap
from ffncompress.reading import better_reading, check_ids, check_length, embedding_rows
from ffncompress.recovery import HybridFit, LinearFit, NeuronFit
from ffncompress.scoring import (
    PLAIN,
    Fitted,
    fit_block,
    fit_name,
    menu,
    replacement,
    score_block,
    score_swap,
    shape_of,
)
from ffncompress.selection import Choice, Market, joint_check, surprise, within_factor
from ffncompress.settings import Budget, PlanSettings, parse_blocks
from ffncompress.stages import Stages, fingerprint
from ffncompress.swaps import SequenceErrors, measure_base, measure_swaps, perplexity, sequence_losses
from ffncompress.windows import Windows
from ffncompress.workers import Track, Workers, silent, stage

GRADIENT_TOKENS = 4096  # of either text, for a backward pass
SWAP_TOKENS = 2048  # of the choose text, for what is tried block by block; the joint check takes all of it
_Seconds = tuple[list[list[Option]], list[float], float]  # options with theirs, of the FFNs as they are, of the model
SWAP_RATIO = 8.0  # the paper's factor: what is tried alone where the budget names none


@dataclass
class Survey:
    """A model, its text, and what the passes over it gave, block by block."""

    source: ModelSource
    model: Any
    blocks: list[Block]
    corpus: Corpus
    workers: Workers
    track: Track
    base: float  # perplexity on the choose windows
    base_losses: Tensor  # of each verify window
    scores: list[Scores]
    menus: list[list[Option]]
    swaps: list[Swap]
    fitted: list[Fitted]
    metrics: list[Tensor]  # what the loss feels of each block's errors, by direction
    moments: dict[str, Tensor] | None
    doubt: str | None  # why the base's perplexity cannot be what a change is judged by
    stages: Stages = field(default_factory=Stages)

    def market(self) -> Market:
        factors = [surprise(swap, self.base) for swap in self.swaps]
        return Market(self.blocks, self.menus, factors, decide=self.workers.once)

    def modules(self, choice: Choice) -> dict[int, nn.Module]:
        """The stand-ins of a choice, as fitted on the original model's activations."""
        return {
            i: replacement(block, self.model.get_submodule(block.path), shape_of(option), fitted.maps[fit_name(option)])
            for i, (block, option, fitted) in enumerate(zip(self.blocks, choice, self.fitted, strict=True))
            if option is not None
        }

    def check(self, choice: Choice, settings: PlanSettings, modules: dict[int, nn.Module] | None = None) -> JointCheck:
        """Replace some blocks together and measure."""
        facts = {
            "choice": [option and option.model_dump() for option in choice],
            "refitted": modules is not None,
            "limit": repr(settings.limit),
        }
        return self.stages.do("joint check", facts, JointCheck, lambda: self._check(choice, settings, modules))

    def timed(self, market: Market) -> Market:
        """The market with seconds: measured once, so that a run that goes on chooses as the killed one would have."""

        def measure() -> _Seconds:
            if not self.workers.is_main:  # the others stand still meanwhile
                return [], [], 0.0
            made = time_blocks(self.model, market, self.track)
            return made.menus, made.kept_seconds or [], made.model_seconds

        menus, kept, whole = self.stages.do("timings", {}, _Seconds, measure)
        return replace(market, menus=menus, kept_seconds=kept, model_seconds=whole)

    def _check(self, choice: Choice, settings: PlanSettings, modules: dict[int, nn.Module] | None) -> JointCheck:
        windows = self.corpus.verify
        at = {self.blocks[i].path: module for i, module in (modules or self.modules(choice)).items()}
        with installed(self.model, at):
            size = count_parameters(self.model)
            together = sequence_losses(self.model, windows, self.workers, self.track, f"verifying {len(at)} together")
        found = self.workers.from_main(
            joint_check(
                choice, size, self.base_losses, together, windows.longest, settings.limit, modules is not None,
                windows.scored,
            )
        )  # fmt: skip
        doubt = self.doubt_of(found)
        if doubt and settings.by_limit:
            raise refuse(doubt)
        return found.model_copy(update={"within_limit": False}) if doubt and settings.limit else found

    def doubt_of(self, check: JointCheck) -> str | None:
        """Why a joint check says nothing, or none."""
        return self.doubt or doubt_of_slimmed(check.base_perplexity, check.delta, check.delta_error)

    def check_afresh(self, choice: Choice, modules: dict[int, nn.Module], before: JointCheck) -> JointCheck | None:
        """A check of the same stand-ins on windows that nothing was chosen on; none where the text has too few."""
        facts = {"choice": [option and option.model_dump() for option in choice], "refitted": before.refitted}
        check = partial(self._check_afresh, choice, modules, before)
        return self.stages.do("joint check afresh", facts, JointCheck | None, check)

    def _check_afresh(self, choice: Choice, modules: dict[int, nn.Module], before: JointCheck) -> JointCheck | None:
        windows = self.corpus.fresh
        if len(windows) < VERIFY_WINDOWS:
            return None
        base = sequence_losses(self.model, windows, self.workers, self.track, "measuring the base afresh")
        with installed(self.model, {self.blocks[i].path: module for i, module in modules.items()}):
            together = sequence_losses(self.model, windows, self.workers, self.track, "verifying afresh")
        size, context = before.parameters, before.context
        check = joint_check(choice, size, base, together, context, None, before.refitted, windows.scored)
        return check.model_copy(update={"fresh": True})


def survey(
    source: ModelSource,
    settings: PlanSettings,
    workers: Workers,
    track: Track = silent,
    stages: Stages | None = None,
) -> Survey:
    """Every pass over the model that looks at blocks one by one: moments, base, forecast, swaps."""
    stages = stages or Stages(workers=workers)
    with stage(track, f"loading {source.name}"):
        dtype = workers.dtype(settings.dtype)
        model, tokenizer = load_model(source, dtype=dtype, device_map=workers.device_map), load_tokenizer(source)
    blocks = find_blocks(model)
    check_budget(model, blocks, settings)
    check_length(source.name, model.config, settings.seq_len)
    with stage(track, "reading text"):
        context = context_of(model, settings.context)
        read = partial(better_reading, model, tokenizer, context=context, workers=workers, seed=settings.seed)
        corpus = gather_text(source, settings, tokenizer, context, read)
    check_ids(model, Windows.cat([corpus.fit, corpus.refit, corpus.verify]))
    check_enough_rows(blocks, corpus.fit.numel())
    if stages.folder is not None:
        stages.facts = _facts(source, model, corpus, settings)
    stages.records = [Fitted, LinearFit, NeuronFit, HybridFit, SequenceErrors]
    base_losses = stages.keep(
        "base at the gate's context", {},
        lambda: sequence_losses(model, corpus.verify, workers, track, "measuring the base at the gate's context"),
    )  # fmt: skip
    doubt = stages.do("doubt", {}, str | None, lambda: _doubt_of_base(model, corpus, base_losses, workers, track))
    if doubt and settings.by_limit:
        raise refuse(doubt)

    few = corpus.fit.up_to(GRADIENT_TOKENS)
    metrics = stages.keep("metrics", {}, lambda: loss_metrics(model, blocks, few, workers, settings.seed, track))
    fitted: list[Fitted] = []
    kept: dict[str, Tensor] = {}
    for group in in_passes(blocks):
        known = [stages.find("fits", {"block": block.index}) for block in group]
        if None not in known and not settings.keep_moments:
            fitted += known
            continue
        moments = collect_moments(
            model, group, corpus.fit, corpus.choose, workers, track,
            loop=stages.loop("moments", {"blocks": [block.index for block in group]}),
        )  # fmt: skip
        for block, own in zip(group, moments, strict=True):
            own.metric = metrics[block.index].to(own.fit.x.device)
        made = _fits(model, group, moments, known, workers)
        for at, found in zip(track(range(len(group)), "fitting stand-ins"), made, strict=True):
            name = group[at].index
            fitted.append(found if known[at] is not None else stages.put("fits", {"block": name}, found))
            if settings.keep_moments:
                kept |= {f"{name}.{part}": tensor for part, tensor in moments[at].named_tensors().items()}
            moments[at] = None  # type: ignore[call-overload]  # fits come as moments go: one set of either in memory
    plain = [each.maps[PLAIN] for each in fitted]
    losses, errors = stages.keep(
        "base", {},
        lambda: measure_base(model, blocks, plain, corpus.choose, workers, track),  # type: ignore[arg-type]
    )  # fmt: skip
    base = perplexity(losses, corpus.choose.scored)
    maps = [each.maps for each in fitted]
    some = corpus.choose.up_to(GRADIENT_TOKENS)
    predicted = stages.keep(
        "predictions", {},
        lambda: predict_losses(
            model, blocks, maps, some, workers, settings.seed, track, stages.loop("predicting", {})
        ),
    )  # fmt: skip
    menus = workers.from_main([menu(*each) for each in zip(blocks, fitted, predicted, strict=True)])
    ratio = Budget.parse(settings.budget).ratio or SWAP_RATIO
    tried = [
        min((o for o in options if within_factor(b, o, ratio)), key=lambda o: o.predicted_loss)
        for b, options in zip(blocks, menus, strict=True)
    ]
    variants = [
        replacement(b, model.get_submodule(b.path), shape_of(o), f.maps[fit_name(o)])
        for b, f, o in zip(blocks, fitted, tried, strict=True)
    ]
    tried_on = corpus.choose.up_to(SWAP_TOKENS, least=2)
    ratios = {"ratio": ratio}
    rises = stages.keep(
        "swaps", ratios,
        lambda: measure_swaps(
            model, blocks, variants, tried_on, workers, track, stages.loop("swapping", ratios)
        ),
    )  # fmt: skip
    scores = [score_block(*each) for each in zip(fitted, errors, strict=True)]
    swaps = [score_swap(b, t, r, base, tried_on.scored) for b, t, r in zip(blocks, tried, rises, strict=True)]
    base, scores, swaps = workers.from_main((base, scores, swaps))  # what is decided by is the same in all processes
    return Survey(
        source=source,
        model=model,
        blocks=blocks,
        corpus=corpus,
        workers=workers,
        track=track,
        base=base,
        base_losses=base_losses,
        scores=scores,
        menus=menus,
        swaps=swaps,
        fitted=fitted,
        metrics=metrics,
        moments=kept if settings.keep_moments else None,
        doubt=doubt,
        stages=stages,
    )


def _fits(
    model: Any, group: list[Block], moments: list[BlockMoments], known: list[Fitted | None], workers: Workers
) -> Iterator[Fitted]:
    """The fits of each block, those that are not known made by one process each.

    Between GPUs they would travel through their memory, which moments fill: there every process makes its own.
    """

    def fit(at: int) -> Fitted:
        return known[at] or fit_block(group[at], moments[at], model.get_submodule(group[at].path))

    places = range(len(group))
    return workers.deal(places, fit) if workers.device.type == "cpu" else map(fit, places)


def _doubt_of_base(model: Any, corpus: Corpus, losses: Tensor, workers: Workers, track: Track) -> str | None:
    """Whether the base reads its text at the context of the check; known before the long passes."""
    at_check = at_scoring = Measured.of(losses, corpus.verify.scored, corpus.verify.longest)
    if corpus.choose.longest < corpus.verify.longest:
        short = sequence_losses(model, corpus.choose, workers, track, "measuring the base")
        at_scoring = Measured.of(short, corpus.choose.scored, corpus.choose.longest)
    return doubt_of_base(at_scoring, at_check, embedding_rows(model))


def _facts(source: ModelSource, model: Any, corpus: Corpus, settings: PlanSettings) -> dict[str, Any]:
    """All that what is measured depends on: the model and its code, the tokens, and how they are computed with."""
    code = sorted(source.directory.glob("*.py")) if source.trust_remote_code else []
    windows = (corpus.fit, corpus.refit, corpus.choose, corpus.verify, corpus.fresh)
    return {
        "model": source.fingerprint(),
        "code": [file.read_text(encoding="utf-8") for file in code],
        "dtype": str(model.dtype),
        "windows": [fingerprint(*each) for each in windows],
        "seed": settings.seed,
    }


def check_budget(model: Any, blocks: list[Block], settings: PlanSettings) -> None:
    """Whether a budget can be met at all, before anything is measured.

    Raises:
        BudgetError: it cannot; says what can.
    """
    if settings.blocks:
        parse_blocks(settings.blocks, len(blocks))
    whole = count_parameters(model)
    size = size_cap(settings, whole)
    rest = whole - sum(block.parameters for block in blocks)
    if size is not None and size < rest + sum(block.d_out for block in blocks):
        raise BudgetError(
            f"{size:,} parameters cannot be reached: {rest:,} of the model's {whole:,} are outside its FFNs; "
            f"ask for more than that"
        )


def size_cap(settings: PlanSettings, whole: int) -> int | None:
    """The most parameters that the settings allow the whole model, or none."""
    caps = [cap for cap in (Budget.parse(settings.budget).size(whole), settings.at and int(settings.at * whole)) if cap]
    return min(caps) if caps else None
