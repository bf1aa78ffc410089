"""Healing: what moves and what does not, that it helps or is taken back, and that a killed one goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import tiny_model

from ffncompress import api, load
from ffncompress.checkpoint import saving
from ffncompress.checkpoint.origin import read_origin
from ffncompress.cli import run
from ffncompress.errors import FfncompressError, ModelError
from ffncompress.models import find_model, forward, load_model
from ffncompress.passes import heal, moving
from ffncompress.passes.moving import Moving
from ffncompress.passes.objective import CAUSAL, Embedding, Masked, objective_of
from ffncompress.records.origin import Healing
from ffncompress.runtime import stages
from ffncompress.storage.manifest import MANIFEST_FILE
from ffncompress.storage.working import working_folder

pytestmark = pytest.mark.slow


class Stop(BaseException):
    """A kill, as far as the code inside can tell."""


class Stopping:
    """A progress that raises at the n-th item of the healing."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, items, description, /):
        for i, item in enumerate(items):
            if description == "healing" and i == self.at:
                raise Stop
            yield item


WAYS = ("replaced", "all", "lora")
FIXED = {"all": ("wte", "wpe", "lm_head"), "lora": ("wte", "wpe", "lm_head", "ln_", ".bias")}
IDS = torch.arange(120).view(3, 40) * 7 + 3


@pytest.fixture(scope="module")
def harsh_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three blocks of the embedded model cut down to almost nothing: there is something to heal."""
    directory = tmp_path_factory.mktemp("plans") / "harsh"
    api.plan("demo", directory, tokens=4096, seq_len=64, blocks="1,3,5", budget="60x", refit=False)
    return directory


@pytest.fixture(scope="module")
def plain(harsh_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The closed form."""
    return load(api.compress(harsh_plan, tmp_path_factory.mktemp("plain") / "plain")).state_dict()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that gives each step a second: so many minutes are so many steps, on any machine."""

    def timed(work) -> float:
        work()
        return 1.0

    monkeypatch.setattr(heal, "_timed", timed)


def replaced(name: str) -> bool:
    return ".h.1.mlp" in name or ".h.3.mlp" in name or ".h.5.mlp" in name


@pytest.mark.parametrize("what", WAYS)
def test_it_helps_and_moves_what_it_says(what, harsh_plan: Path, plain, tmp_path: Path, capsys, counted) -> None:
    asked = ["--heal", "0.3", "--heal-what", what]
    assert run(["apply", str(harsh_plan), "-o", str(tmp_path / "healed"), *asked]) == 0
    out = " ".join(capsys.readouterr().out.split())
    healing = read_origin(tmp_path / "healed").healing
    assert healing.original < healing.healed < healing.closed_form
    assert healing.kept
    assert (healing.what, healing.steps, healing.seconds) == (what, 16, 16)
    assert healing.rate in heal.RATES
    assert f"healed in 0.3 min, {healing.moved}: 16 steps, {healing.tokens:,} tokens, {healing.pace:,.0f} a" in out
    card = (tmp_path / "healed" / "README.md").read_text()
    assert f"{healing.moved} were distilled from the original for 0.3 minutes (16 steps, " in card
    assert f"--heal 0.3 --heal-what {what}" in card
    base = load_model(find_model("demo")).state_dict()
    healed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "healed").state_dict()
    assert healed.keys() == plain.keys()
    for name, value in healed.items():
        if replaced(name):
            assert not value.numel() or not torch.equal(value, plain[name])
        elif what == "replaced" or any(part in name for part in FIXED[what]):
            assert torch.equal(value, base[name])
    matrices = [name for name in healed if ".attn.c_" in name and name.endswith(".weight")]
    assert matrices
    assert all(torch.equal(healed[name], base[name]) == (what == "replaced") for name in matrices)


@pytest.mark.parametrize("what", WAYS)
def test_what_does_not_help_is_taken_back(
    what, harsh_plan: Path, plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted
) -> None:
    monkeypatch.setattr(heal, "RATES", (10.0,))
    healed = load(api.compress(harsh_plan, tmp_path / "healed", heal=0.1, heal_what=what))
    assert read_origin(tmp_path / "healed").healing.kept is False
    assert healed.state_dict().keys() == plain.keys()
    for name, value in healed.state_dict().items():
        assert torch.equal(value, plain[name])
    assert "nothing was trained" in (tmp_path / "healed" / "README.md").read_text()


@pytest.mark.parametrize("what", WAYS)
def test_a_killed_one_goes_on_to_the_same_bytes(
    what, harsh_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted
) -> None:
    asked = {"heal": 0.3, "heal_what": what}
    api.compress(harsh_plan, tmp_path / "whole", **asked)
    monkeypatch.setattr(stages, "PAUSE", 0.0)
    monkeypatch.setattr(stages, "WORTH", 0.0)
    steps = []
    own = heal._Course._step
    monkeypatch.setattr(heal._Course, "_step", lambda *args: (steps.append(1), own(*args)))
    out = tmp_path / "stopped"
    for at in (40, 30):
        with pytest.raises(Stop):
            api.compress(harsh_plan, out, progress=Stopping(at), **asked)
        assert not out.exists()
        assert working_folder(out).is_dir()
    before = len(steps)
    api.compress(harsh_plan, out, **asked)
    assert len(steps) - before < 16  # neither the rates are tried again nor the first steps taken
    assert not working_folder(out).exists()
    for file in (tmp_path / "whole").rglob("*"):
        if file.is_file() and file.name != MANIFEST_FILE:
            assert file.read_bytes() == (out / file.relative_to(tmp_path / "whole")).read_bytes(), file


def test_a_state_that_is_not_ours_is_left_alone(harsh_plan: Path, demo_model) -> None:
    module = demo_model.transformer.h[1].mlp
    course = heal._Course(demo_model, demo_model, Moving(demo_model, [module], "replaced"), [IDS], None)
    good = course._state(course._optimiser())
    assert course._take_up(good, course._optimiser())
    for bad in (None, [], {}, {**good, "values": good["values"][:1]}, {**good, "values": 7}, {**good, "steps": "x"},
                {**good, "optimiser": {}}):  # fmt: skip
        assert not course._take_up(bad, course._optimiser())


def test_several_texts_take_turns(harsh_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer) -> None:
    files = []
    for i, word in enumerate(("alpha", "omega")):
        files.append(tmp_path / f"{word}.txt")
        files[i].write_text("".join(f"{word} {n} said {word} number {n % 13} and went on\n" for n in range(2000)))
    seen = []

    def watching(_model, _original, _modules, fit, *_rest) -> Healing:
        seen.extend(tokenizer.decode(row) for row in fit)
        return Healing(1, 1, 1, 1.0, 2.0, 1.5, True)

    monkeypatch.setattr(saving, "heal_", watching)
    asked = [word for file in files for word in ("--data", str(file))]
    assert run(["apply", str(harsh_plan), "-o", str(tmp_path / "out"), "--heal", "1", *asked]) == 0
    assert len(seen) * 64 > 4096  # more than the plan was fitted on: as much as the minutes can use
    for some in (seen[:8], seen[-8:]):
        assert 2 <= sum("alpha" in text for text in some) <= 6
        assert all(("alpha" in text) != ("omega" in text) for text in some)


def test_without_peft_it_says_what_to_install(
    harsh_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(moving, "find_spec", lambda _: None)
    assert run(["apply", str(harsh_plan), "-o", str(tmp_path / "x"), "--heal", "1", "--heal-what", "lora"]) == 2
    assert "pip install 'ffncompress[heal]'" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "asked",
    [["--heal", "0"], ["--heal", "-1"], ["--heal", "nan"], ["--heal", "much"], ["--heal-what", "all"],
     ["--heal", "1", "--heal-what", "everything"], ["--heal", "0.01", "--device", "nowhere"]],
    ids=" ".join,
)  # fmt: skip
def test_bad_values_are_refused(asked: list[str], harsh_plan: Path, tmp_path: Path, capsys) -> None:
    assert run(["apply", str(harsh_plan), "-o", str(tmp_path / "x"), *asked]) == 2
    assert capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_python_says_so_too(harsh_plan: Path, tmp_path: Path) -> None:
    with pytest.raises(FfncompressError, match="say for how many minutes"):
        api.compress(harsh_plan, tmp_path / "x", heal_what="lora")
    (tmp_path / "y.partial").mkdir()
    (tmp_path / "y.partial" / "theirs").write_text("")
    api.compress(harsh_plan, tmp_path / "y")  # without healing nothing is written there
    with pytest.raises(FfncompressError, match="not a working folder"):
        api.compress(harsh_plan, tmp_path / "y", heal=0.05, overwrite=True)


def test_papers_of_earlier_releases_are_read(harsh_plan: Path, tmp_path: Path, capsys) -> None:
    api.compress(harsh_plan, tmp_path / "healed", heal=0.03)
    file = tmp_path / "healed" / "ffncompress" / "origin.json"
    content = json.loads(file.read_text())
    for name in ("what", "rate", "seconds"):
        del content["healing"][name]
    file.write_text(json.dumps(content))
    healing = read_origin(tmp_path / "healed").healing
    assert (healing.what, healing.rate, healing.pace) == ("replaced", None, None)


def test_the_best_rung_is_walked_to() -> None:
    ladder = (1.0, 2.0, 3.0, 4.0, 5.0)
    for best in ladder:
        asked: list[float] = []
        assert heal.best_of(ladder, lambda x, best=best, asked=asked: asked.append(x) or abs(x - best)) == best
        assert len(asked) == len(set(asked)) <= 4
    assert heal.best_of((7.0,), lambda _: 1.0) == 7.0
    assert heal.best_of(ladder, lambda x: float("inf") if x > 1 else 1.0) == 3.0  # no way to see from there


@pytest.mark.parametrize("family", ["gpt2", "llama-tied", "gemma3_text", "opt"])
def test_kept_answers_give_the_whole_divergence(family: str) -> None:
    """With as many tokens as there are, the value and the gradient are those of the full distributions."""
    original, model = tiny_model(family), tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    target = forward(original, IDS).logits.detach().flatten(0, 1).log_softmax(-1)
    found = forward(model, IDS).logits.flatten(0, 1).log_softmax(-1)
    whole = F.kl_div(found, target, log_target=True, reduction="batchmean")
    watched = next(p for name, p in model.named_parameters() if ".0." in name and p.dim() == 2)
    (expected,) = torch.autograd.grad(whole, watched)
    known = CAUSAL.distance(model, IDS, CAUSAL.answers(original, IDS, 3072))
    (gradient,) = torch.autograd.grad(known, watched)
    assert known.item() == pytest.approx(whole.item(), rel=1e-4)
    assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    tokens, chances = CAUSAL.answers(original, IDS)
    assert tokens.shape == chances.shape == (3, 40, 64)
    assert chances.exp().sum(-1).max() <= 1 + 1e-5
    assert 0 < CAUSAL.distance(model, IDS, (tokens, chances)).item() <= whole.item() * (1 + 1e-5)
    assert CAUSAL.distance(original, IDS, (tokens, chances)).item() == pytest.approx(0, abs=1e-5)


def tiny_encoder(kind: type) -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    return kind(transformers.BertConfig(**sizes, vocab_size=3072, initializer_range=0.2)).eval()


@pytest.mark.parametrize("what", WAYS)
@pytest.mark.parametrize("task", ["masked", "embedding"])
def test_encoders_come_nearer_too(task: str, what) -> None:
    kind = transformers.BertForMaskedLM if task == "masked" else transformers.BertModel
    original, model = tiny_encoder(kind), tiny_encoder(kind)
    objective = Masked(5) if task == "masked" else Embedding(original)
    model.__dict__["_objective"] = objective
    layer = (model.bert if task == "masked" else model).encoder.layer[1]
    with torch.no_grad():
        layer.output.dense.weight.mul_(0.2)
    with torch.no_grad():
        answers = objective.answers(original, IDS)
    assert objective.distance(original, IDS, answers).item() == pytest.approx(0, abs=1e-5)
    moves = Moving(model, [layer.output.dense], what)
    start, before = objective_of(model).distance(model, IDS, answers).item(), model.state_dict()
    before = {name: value.clone() for name, value in before.items() if "lora" not in name}
    optimiser = torch.optim.AdamW(moves.parameters, 1e-3)
    for _ in range(10):
        optimiser.zero_grad()
        objective.distance(model, IDS, answers).backward()
        optimiser.step()
    moves.settle_(torch.float32)
    assert objective.distance(model, IDS, answers).item() < 0.9 * start
    moves.begin_()
    for name, value in model.state_dict().items():
        assert torch.equal(
            value,
            before[name.replace(".base_layer", "")]
            if name in before
            else before[name.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")],
        )


def test_a_model_without_a_linear_layer_takes_no_adapters(demo_model) -> None:
    with pytest.raises(ModelError, match="heal with --heal-what replaced"):
        Moving(demo_model, [demo_model.transformer], "lora")
