"""What the passes over a model found, and what a choice asks of it: how large it is, and what it costs together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from ffncompress.budgets import Limit, Use
from ffncompress.models import Block, ModelSource, count_parameters, ffn_of, installed, shelved
from ffncompress.passes.doubts import doubt_of_slimmed, refuse
from ffncompress.passes.losses import mean_and_error, perplexity, sequence_losses
from ffncompress.planning.latency import time_blocks
from ffncompress.planning.search import Choice, SearchSpace, correction
from ffncompress.records.plan import JointCheck, Option, Scores, Swap
from ffncompress.replacement.building import build_replacement
from ffncompress.replacement.fitting import Fitted, fit_name
from ffncompress.runtime.run import Run
from ffncompress.settings import PlanSettings
from ffncompress.text.corpus import VERIFY_WINDOWS, Corpus
from ffncompress.type_aliases import Model

CONFIDENCE = 1.645  # standard errors: one-sided 95 %
_Seconds = tuple[list[list[Option]], list[float], float]  # options with theirs, of the FFNs as they are, of the model


@dataclass
class MeasuredModel:
    """A model, its text, and what the passes over it gave, block by block."""

    source: ModelSource
    model: Model
    blocks: list[Block]
    kept_layers: dict[int, str]  # those without a block, and why
    corpus: Corpus
    run: Run
    base: float  # perplexity on the choose windows
    base_losses: Tensor  # of each verify window
    scores: list[Scores]
    menus: list[list[Option]]
    swaps: list[Swap]
    fitted: list[Fitted]
    metrics: list[Tensor]  # what the loss feels of each block's errors, by direction
    moments: dict[str, Tensor] | None
    doubt: str | None  # why the base's perplexity cannot be what a change is judged by

    def space(self) -> SearchSpace:
        """What can be chosen among, with predictions raised where a measured swap was clearly worse."""
        factors = [correction(swap, self.base) for swap in self.swaps]
        return SearchSpace(self.blocks, self.menus, factors, decide=self.run.workers.once)

    def modules(self, choice: Choice) -> dict[int, nn.Module]:
        """The replacements of a choice, as fitted on the original model's activations."""
        return {
            i: self._module(block, option, fitted)
            for i, (block, option, fitted) in enumerate(zip(self.blocks, choice, self.fitted, strict=True))
            if option is not None
        }

    def _module(self, block: Block, option: Option, fitted: Fitted) -> nn.Module:
        ffn = ffn_of(self.model, block)
        return shelved(build_replacement(block, ffn, option.shape, fitted.maps[fit_name(option)]), self.model)

    def check(self, choice: Choice, settings: PlanSettings, modules: dict[int, nn.Module] | None = None) -> JointCheck:
        """Replace some blocks together and measure."""
        facts = {
            "choice": [option and option.model_dump() for option in choice],
            "refitted": modules is not None,
            "limit": repr(settings.limit),
        }
        return self.run.stages.do("joint check", facts, JointCheck, lambda: self._check(choice, settings, modules))

    def timed(self, space: SearchSpace, use: Use) -> SearchSpace:
        """The space with seconds: measured once, so that a run that goes on chooses as the killed one would have."""

        def measure() -> _Seconds:
            if not self.run.workers.is_main:  # the others stand still meanwhile
                return [], [], 0.0
            made = time_blocks(self.model, space, use, self.run.progress)
            return made.menus, made.kept_seconds or [], made.model_seconds

        menus, kept, whole = self.run.stages.do("timings", {"use": use}, _Seconds, measure)
        return replace(space, menus=menus, kept_seconds=kept, model_seconds=whole)

    def _check(self, choice: Choice, settings: PlanSettings, modules: dict[int, nn.Module] | None) -> JointCheck:
        windows = self.corpus.verify
        at = {self.blocks[i].path: module for i, module in (modules or self.modules(choice)).items()}
        with installed(self.model, at):
            size = count_parameters(self.model)
            together = sequence_losses(self.model, windows, self.run, f"verifying {len(at)} together")
        found = self.run.workers.from_main(
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
        """A check of the same replacements on windows that nothing was chosen on; none where the text has too few."""
        facts = {"choice": [option and option.model_dump() for option in choice], "refitted": before.refitted}
        check = partial(self._check_afresh, choice, modules, before)
        return self.run.stages.do("joint check afresh", facts, JointCheck | None, check)

    def _check_afresh(self, choice: Choice, modules: dict[int, nn.Module], before: JointCheck) -> JointCheck | None:
        windows = self.corpus.fresh
        if len(windows) < VERIFY_WINDOWS:
            return None
        base = sequence_losses(self.model, windows, self.run, "measuring the base afresh")
        with installed(self.model, {self.blocks[i].path: module for i, module in modules.items()}):
            together = sequence_losses(self.model, windows, self.run, "verifying afresh")
        size, context = before.parameters, before.context
        check = joint_check(choice, size, base, together, context, None, before.refitted, windows.scored)
        return check.model_copy(update={"fresh": True})


def joint_check(
    choice: Choice,
    parameters: int,
    base: Tensor,
    together: Tensor,
    context: int,
    limit: Limit | None,
    refitted: bool,
    tokens: Tensor | None = None,
) -> JointCheck:
    """Whether blocks replaced together keep within the limit, with CONFIDENCE and not just on average.

    Args:
        choice: what is done with each block.
        parameters: of the whole model.
        base: the original model's loss on each sequence.
        together: the patched model's.
        context: the length of the longest sequence.
        limit: how much perplexity may rise.
        refitted: whether the replacements were fitted on the slimmed model's own inputs.
        tokens: that were scored of each sequence; none: the same number of each.
    """
    before, after = perplexity(base, tokens), perplexity(together, tokens)
    error = after * mean_and_error(together - base, tokens)[1]
    within = None if limit is None else limit.allows(before, after + CONFIDENCE * error)
    return JointCheck(
        blocks=[i for i, option in enumerate(choice) if option is not None], parameters=parameters, refitted=refitted,
        context=context, base_perplexity=before, perplexity=after, delta=after - before, delta_error=error,
        within_limit=within, windows=len(base),
    )  # fmt: skip
