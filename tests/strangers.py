"""What must hold of everything that a stranger can send, one function for each kind of file.

A kind takes a seeded chance, lays out a damaged folder, does with it what a person would, and says how that ended:
"refused" with a sentence of ours, "as promised", or "other, and told": it loads with other answers, and `verify` says
so. Whatever else happens is `Wrong`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import matplotlib.font_manager
import torch
from conftest import tiny_model
from mutations import mutated_bytes, mutated_json, mutated_tensors, mutated_yaml
from transformers import AutoModelForCausalLM
from watching import Watch, Wrong, exemplary

from ffncompress import api, load, verify
from ffncompress.checkpoint.origin import read_gate, read_origin, read_plan
from ffncompress.checkpoint.patcher import replacement_modules
from ffncompress.cli import run
from ffncompress.errors import FfncompressError
from ffncompress.models import find_model, installed, load_model, load_tokenizer
from ffncompress.passes.proof import TOLERANCE, prove
from ffncompress.profiling.records import STUDY_FILE, Study
from ffncompress.recipe import Recipe
from ffncompress.records.gate import GateResult
from ffncompress.records.plan import PLAN_FILE, Plan
from ffncompress.records.plan_files import MOMENTS_FILE, TENSOR_FILE, load_tensors
from ffncompress.storage.manifest import MANIFEST_FILE, Manifest
from ffncompress.storage.outputs import staged_directory
from ffncompress.text.parts import read_parts

REFUSED, PROMISED, TOLD = "refused", "as promised", "other, and told"
GATE, ORIGIN, CONFIG, WEIGHTS = "ffncompress/gate.json", "ffncompress/origin.json", "config.json", "model.safetensors"
IDS = torch.arange(5, 69)[None]
LINKED = 100_000  # bytes: larger files are linked into a case, not copied


def materials(root: Path) -> tuple[Path, list[Path], Path]:
    """Whole folders as `Bench` wants them: a plan, its checkpoint and a small one of another family, and moments."""
    tokenizer = load_tokenizer(find_model("demo"))
    for family in ("gpt2", "llama"):
        tiny_model(family).save_pretrained(root / family)
        tokenizer.save_pretrained(root / family)
    api.plan("demo", root / "plan", tokens=2048, blocks="1,3", budget="8x", refit=False)
    api.plan(str(root / "llama"), root / "small-plan", tokens=2048, blocks="0,2", budget="4x", refit=False)
    api.plan(str(root / "gpt2"), root / "kept", tokens=2048, budget="-10%", keep_moments=True, frontier=True)
    slims = [
        api.compress(root / "plan", root / "slim", dtype="float32"), api.compress(root / "small-plan", root / "small")
    ]  # fmt: skip
    return root / "plan", slims, root / "kept"


class Bench:
    """Whole folders to damage, and a place to do it in."""

    def __init__(self, root: Path, plan: Path, slims: list[Path], kept: Path) -> None:
        """Prepare.

        Args:
            root: an empty folder; nothing outside it may change.
            plan: a plan of the embedded model.
            slims: slimmed checkpoints in float32, for in 16 bits answers stray; the first made from that plan.
            kept: a plan with moments, of a small model.
        """
        self.watch = Watch(root)
        self.root, whole = root, root / "whole"  # copies: what a case links to is ours alone
        self.plan, self.kept = (shutil.copytree(folder, whole / folder.name) for folder in (plan, kept))
        self.slims = [shutil.copytree(slim, whole / slim.name) for slim in slims]
        self.model = load_model(find_model("demo"), dtype="float32")
        self.logits = {slim: load(slim)(IDS).logits for slim in self.slims}
        for name in ("cwd", "study", "texts"):
            (root / name).mkdir()
        (root / "study" / STUDY_FILE).write_text(exemplary(Study).model_dump_json())
        (root / "texts" / "t.jsonl").write_text(
            "".join(json.dumps({"text": f"word {i} " * 30}) + "\n" for i in range(40))
        )
        matplotlib.font_manager.fontManager.findfont("sans")  # it looks for fonts once, and writes down what it found
        matplotlib.get_configdir()
        self._gate = exemplary(GateResult).model_dump_json().encode()

    def once(self, kind: str, seed: int) -> str:
        """One input of a kind; returns how it ended.

        Raises:
            Wrong: in a way that it must not.
        """
        chance = Random(f"{kind} {seed}")
        shutil.rmtree(self.root / "out", ignore_errors=True)
        os.chdir(self.root / "cwd")
        self._rewritten: tuple[str, ...] = ()
        try:
            with self.watch():
                outcome = KINDS[kind](self, chance)
        except FfncompressError:
            outcome = REFUSED
        except Wrong:
            raise
        except Exception as error:
            raise Wrong(f"{type(error).__name__}: {error}"[:300]) from error
        self.watch.solve(*self._rewritten)
        return outcome

    # how a case is laid out and run

    def lay_out(self, source: Path, changed: dict[str, bytes], *, marked: bool = True) -> Path:
        """A copy of a folder with some files changed; marked: a stranger can write checksums, and code, too."""
        folder = self.root / "case"
        shutil.rmtree(folder, ignore_errors=True)
        for file in source.rglob("*"):
            name = file.relative_to(source)
            if file.is_file() and name.as_posix() not in changed:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (os.link if file.stat().st_size > LINKED else shutil.copyfile)(file, folder / name)
        for name, content in changed.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        if marked:
            self.watch.put_canary(folder)
            kind = "checkpoint" if (folder / CONFIG).exists() else "plan"
            Manifest.write(folder, kind)
        self.watch.begin()
        return folder

    def command(self, *arguments: str | Path) -> bool:
        """A command ends well or in a sentence of ours; returns which."""
        with self.watch() as heard:
            code = run([str(word) for word in arguments])
        said = heard()
        if code not in (0, 2) or any(words in said for words in ("a bug in ffncompress", "Traceback", "(traceback:")):
            raise Wrong(f"{arguments[0]} ended with {code}: {said[-300:]}")
        return code == 0

    # the kinds

    def plans(self, chance: Random) -> str:
        content = mutated_json((self.plan / PLAN_FILE).read_bytes(), chance)
        folder = self.lay_out(self.plan, {PLAN_FILE: content})
        plan = self._shown(folder, Plan.load, chance)
        outcome = self._patched(plan, folder)
        if chance.random() < 0.05:
            api.compress(folder, self.root / "out")
            verify(self.root / "out")
        return outcome

    def sized_plans(self, chance: Random) -> str:
        """A plan for a size, which promises what it measured, with a frontier."""
        content = mutated_json((self.kept / PLAN_FILE).read_bytes(), chance)
        folder = self.lay_out(self.kept, {PLAN_FILE: content})
        plan = self._shown(folder, Plan.load, chance)
        Plan.model_validate_json(plan.public().model_dump_json())  # what is saved of it can be read again

        return PROMISED

    def replacements(self, chance: Random) -> str:
        """Tensors changed, and the plan's checksum of them too, or not."""
        before = (self.plan / TENSOR_FILE).read_bytes()
        after = mutated_tensors(before, chance)
        own = json.loads((self.plan / PLAN_FILE).read_bytes())
        believed = chance.random() < 0.8
        own["replacements_sha256"] = hashlib.sha256(after if believed else before).hexdigest()
        folder = self.lay_out(self.plan, {TENSOR_FILE: after, PLAN_FILE: json.dumps(own).encode()})
        outcome = self._patched(Plan.load(folder), folder, signed=believed)
        if not believed and after != before:
            raise Wrong("tensors that are not the plan's were taken")
        return outcome

    def _patched(self, plan: Plan, folder: Path, *, signed: bool = False) -> str:
        """The model with a plan's replacements answers as the plan says, or not at all."""
        tensors = load_tensors(plan, folder)
        modules = replacement_modules(self.model, plan, tensors)
        with installed(self.model, modules):
            prove(self.model, plan.proof)
            found = self.model(IDS).logits
        if self._same(found, self.logits[self.slims[0]], signed=signed):
            return PROMISED
        whole = Plan.load(self.plan)
        if plan.proof is None and [b.choice for b in plan.blocks] != [b.choice for b in whole.blocks]:
            return TOLD  # another plan, of a release that proved nothing
        raise Wrong("a plan gives other answers, and proves itself")

    def configs(self, chance: Random) -> str:
        slim = chance.choice(self.slims)
        folder = self.lay_out(slim, {CONFIG: mutated_json((slim / CONFIG).read_bytes(), chance)})
        if chance.random() < 0.2 and self._shallow(folder):
            try:
                plain = AutoModelForCausalLM.from_pretrained(folder)
            except Wrong:
                raise
            except Exception:  # whatever transformers says, it has not loaded
                return REFUSED
            return self._answers(plain, slim, folder)
        return self._answers(load(folder), slim, folder)

    @staticmethod
    def _shallow(folder: Path) -> bool:
        """Whether plain transformers would come to an end: it builds all layers that a config names."""
        try:
            config = json.loads((folder / CONFIG).read_bytes())
            return all(float(config.get(key) or 0) < 1000 for key in ("n_layer", "num_hidden_layers"))
        except Exception:
            return True

    def _answers(self, model: Any, slim: Path, folder: Path, *, signed: bool = False) -> str:
        """A checkpoint that loads answers as promised, or `verify` says that it does not."""
        try:
            found = model.eval()(IDS, use_cache=False).logits.float()
        except Exception:  # it stops; that is no wrong answer
            found = None
        if found is not None and self._same(found, self.logits[slim], signed=signed):
            return PROMISED
        try:
            verify(folder)
        except FfncompressError:
            return TOLD
        raise Wrong("a checkpoint gives other answers, and verify passes")

    @staticmethod
    def _same(found: torch.Tensor, promised: torch.Tensor, *, signed: bool = False) -> bool:
        """Up to what proofs forgive: a bit of the last place, an epsilon that is not felt.

        Other weights that a stranger has signed with checksums of his own are other weights: a proof tells models
        apart, not one weight in thirty thousand, so of those only the mean loss is compared.
        """
        if found.shape != promised.shape:
            return False
        after, before = (
            torch.nn.functional.cross_entropy(x[0, :-1], IDS[0, 1:], reduction="none") for x in (found, promised)
        )
        misses = (after - before).abs() / (1 + before.abs())
        return bool(misses.mean() <= TOLERANCE if signed else misses.max() <= 2 * TOLERANCE)

    def weights(self, chance: Random) -> str:
        """Every change is noticed by verify; what loads nevertheless is whole and finite."""
        slim = chance.choice(self.slims)
        before = (slim / WEIGHTS).read_bytes()
        after = mutated_tensors(before, chance)
        folder = self.lay_out(slim, {WEIGHTS: after}, marked=False)
        if after != before:
            try:
                verify(folder)
            except FfncompressError:
                pass
            else:
                raise Wrong("other bytes, and verify passes")
        self._rewritten = (MANIFEST_FILE,)
        Manifest.write(folder, "checkpoint")
        return self._answers(load(folder), slim, folder, signed=True)

    def gates(self, chance: Random) -> str:
        return self._record(GATE, mutated_json(self._gate, chance), read_gate, chance)

    def origins(self, chance: Random) -> str:
        return self._record(ORIGIN, mutated_json((self.slims[-1] / ORIGIN).read_bytes(), chance), read_origin, chance)

    def carried_plans(self, chance: Random) -> str:
        name = f"ffncompress/{PLAN_FILE}"
        return self._record(name, mutated_json((self.slims[-1] / name).read_bytes(), chance), read_plan, chance)

    def _record(self, name: str, content: bytes, read: Callable[[Path], Any], chance: Random) -> str:
        """A checkpoint that says something else of itself: shown, and pushed as far as the network's edge."""
        folder = self.lay_out(self.slims[-1], {GATE: self._gate, name: content})
        self._shown(folder, read, chance)
        if chance.random() < 0.5:
            self._rewritten = ("README.md", MANIFEST_FILE)
            self.command("push", folder, "a/b", "--force")
        return PROMISED

    def _shown(self, folder: Path, read: Callable[[Path], Any], chance: Random) -> Any:
        """What can be read can be shown; what cannot is refused by the command too, which is tried now and then."""
        try:
            found = read(folder)
        except FfncompressError:
            if chance.random() < 0.1 and self.command("show", folder):
                raise Wrong("shown, and not to be read") from None
            raise
        if chance.random() < 0.5 and not self.command("show", folder):
            raise Wrong("it can be read, and not be shown")
        return found

    def manifests(self, chance: Random) -> str:
        slim = self.slims[-1]
        before = (slim / MANIFEST_FILE).read_bytes()
        after = mutated_json(before, chance)
        folder = self.lay_out(slim, {MANIFEST_FILE: after}, marked=False)
        Manifest.read(folder)
        shown = self.command("show", folder)
        if chance.random() < 0.2:  # it decides what may be replaced, and names nothing that is followed
            self._rewritten = ("",)
            with staged_directory(folder, "checkpoint", overwrite=True):
                pass
        return PROMISED if shown else REFUSED

    def studies(self, chance: Random) -> str:
        content = mutated_json((self.root / "study" / STUDY_FILE).read_bytes(), chance)
        folder = self.lay_out(self.root / "study", {STUDY_FILE: content})
        study = self._shown(folder, Study.load, chance)
        Study.model_validate_json(study.model_dump_json())  # what it is saved as can be read again
        return PROMISED

    def recipes(self, chance: Random) -> str:
        source = chance.choice(self._recipes())
        folder = self.lay_out(self.root / "texts", {"r.yaml": mutated_yaml(source.read_bytes(), chance)})
        recipe, text = Recipe.read(folder / "r.yaml")
        recipe.public_text(text)
        return PROMISED

    @staticmethod
    def _recipes() -> list[Path]:
        return sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))

    def tokenizers(self, chance: Random) -> str:
        slim = self.slims[-1]
        name = chance.choice(("tokenizer.json", "tokenizer_config.json", "tokenizer_config.json"))
        folder = self.lay_out(slim, {name: mutated_json((slim / name).read_bytes(), chance)})
        tokenizer = load_tokenizer(find_model(str(folder)))
        ids = tokenizer("def f(x):\n  return 1")["input_ids"]
        return PROMISED if isinstance(ids, list) else TOLD

    def moments(self, chance: Random) -> str:
        """A plan for another size, from damaged moments or a damaged plan."""
        name, mutated = chance.choice(((MOMENTS_FILE, mutated_tensors), (PLAN_FILE, mutated_json)))
        folder = self.lay_out(self.kept, {name: mutated((self.kept / name).read_bytes(), chance)})
        done = self.command("plan", folder, "-o", self.root / "out", "--at", chance.choice(("0.95", "0.9", "0.85")))
        return PROMISED if done else REFUSED

    def texts(self, chance: Random) -> str:
        content = (self.root / "texts" / "t.jsonl").read_bytes()
        lines = content.splitlines()
        at = chance.randrange(len(lines))
        lines[at] = mutated_json(lines[at], chance)
        content = b"\n".join(lines) if chance.random() < 0.7 else mutated_bytes(content, chance)
        name = chance.choice(("t.jsonl", "t.jsonl", "t.txt", "t.parquet"))
        folder = self.lay_out(self.root / "texts", {name: content})
        parts = read_parts(str(folder / name))
        [part.sha256 for part in parts.values()]
        return PROMISED if all(part.characters for part in parts.values()) else TOLD


KINDS: dict[str, Callable[[Bench, Random], str]] = {
    "plans": Bench.plans, "sized-plans": Bench.sized_plans,
    "replacements": Bench.replacements, "configs": Bench.configs, "weights": Bench.weights,
    "gates": Bench.gates, "origins": Bench.origins, "carried-plans": Bench.carried_plans,
    "manifests": Bench.manifests, "studies": Bench.studies, "recipes": Bench.recipes,
    "tokenizers": Bench.tokenizers, "moments": Bench.moments, "texts": Bench.texts,
}  # fmt: skip
