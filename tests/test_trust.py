"""What strangers send: it runs no code, opens no file, deletes nothing, and never loads wrong in silence."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import GATED, tiny_model
from fresh_process import LOAD, run_python
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ffncompress import api, apply_, load, patched, verify
from ffncompress.cli import run
from ffncompress.errors import ArtifactError, FfncompressError, ModelError, RecipeError, TextError
from ffncompress.hub import uploaded
from ffncompress.models import find_blocks, find_ffns, find_model, load_model
from ffncompress.recipe import Recipe
from ffncompress.sanitize import in_markdown, plain
from ffncompress.storage.manifest import MANIFEST_FILE, Manifest
from ffncompress.storage.registry import record_place, recorded_place
from ffncompress.text.sources import read

pytestmark = pytest.mark.slow

IDS = torch.arange(5, 25)[None]


@pytest.fixture
def slim(demo_slim: Path, tmp_path: Path) -> Path:
    return shutil.copytree(demo_slim, tmp_path / "slim")


@pytest.fixture
def plan(demo_plan: Path, tmp_path: Path) -> Path:
    return shutil.copytree(demo_plan, tmp_path / "plan")


def edit(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


# code


def with_code(folder: Path, spy: Path) -> Path:
    """A model whose config names code of its own, which leaves a trace when it runs."""
    (folder / "own.py").write_text(
        f"open({str(spy)!r}, 'a').write('ran')\n"
        "from transformers import GPT2Config as Own\nfrom transformers import GPT2LMHeadModel as Model\n"
    )
    edit(
        folder / "config.json",
        lambda c: c.update(model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}),
    )
    return folder


def test_a_plan_cannot_turn_code_on(tmp_path: Path, demo_source, plan: Path, capsys) -> None:
    spy = tmp_path / "spy"
    folder = with_code(shutil.copytree(demo_source.directory, tmp_path / "model"), spy)
    source = find_model(str(folder))
    own = {"name": "model", "fingerprint": source.fingerprint(), "is_hub": False, "trust_remote_code": True}
    edit(plan / "plan.json", lambda p: p["base"].update(own))
    with pytest.raises(ModelError, match="--trust-remote-code"):
        api.compress(plan, tmp_path / "out", model=str(folder))
    assert run(["apply", str(plan), "-o", str(tmp_path / "out"), "--model", str(folder)]) == 2
    assert "pass --trust-remote-code" in capsys.readouterr().err
    edit(plan / "plan.json", lambda p: p["base"].update(trust_remote_code=False))  # it may lie about it, too
    with pytest.raises(ModelError):
        api.compress(plan, tmp_path / "out", model=str(folder))
    assert not spy.exists()
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_cannot_turn_code_on(tmp_path: Path, slim: Path) -> None:
    spy = tmp_path / "spy"
    with_code(slim, spy)
    Manifest.write(slim, "checkpoint")  # a stranger can write one too
    edit(slim / "ffncompress" / "plan.json", lambda p: p["base"].update(trust_remote_code=True))
    for attempt in (load, verify, api.evaluate, lambda d: api.push(d, "a/b")):
        with pytest.raises(FfncompressError):
            attempt(slim)
    assert not spy.exists()


def test_a_recipe_cannot_turn_code_on(tmp_path: Path, demo_source) -> None:
    spy = tmp_path / "spy"
    folder = with_code(shutil.copytree(demo_source.directory, tmp_path / "model"), spy)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: {folder}\noutput: {tmp_path / 'out'}\ntrust_remote_code: true\n")
    with pytest.raises(RecipeError, match="--trust-remote-code"):
        api.run(recipe)
    assert not spy.exists()


# loading whole


def without(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def narrower(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][..., :-1].contiguous()


def in_half(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].half()


def in_integers(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].int()


@pytest.mark.parametrize("damage", [without, narrower, in_half, in_integers])
def test_a_damaged_stand_in_does_not_load_by_any_route(slim: Path, damage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = slim / "model.safetensors"
    for name in [n for n in load_file(file) if n.startswith("transformer.h.1.mlp.") and n.endswith("weight")]:
        tensors = load_file(file)
        damage(tensors, name)
        save_file(tensors, file, metadata={"format": "pt"})
        for attempt in (AutoModelForCausalLM.from_pretrained, load, api.evaluate, verify):
            with pytest.raises((ArtifactError, ModelError)):
                attempt(slim)
        assert run(["show", str(slim)]) == 2
        assert run(["push", str(slim), "a/b", "--force"]) == 2


@pytest.mark.parametrize(
    "name", ["transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.bias", "transformer.ln_f.bias"]
)
@pytest.mark.parametrize("damage", [without, narrower])
def test_nor_does_a_damaged_rest(slim: Path, name: str, damage) -> None:
    tensors = load_file(slim / "model.safetensors")
    damage(tensors, name)
    save_file(tensors, slim / "model.safetensors", metadata={"format": "pt"})
    for attempt in (AutoModelForCausalLM.from_pretrained, load):
        with pytest.raises((ArtifactError, ModelError)):
            attempt(slim)


def test_every_flipped_bit_and_every_cut_is_noticed(slim: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = slim / "model.safetensors"
    whole, chance = file.read_bytes(), random.Random(0)
    for i in range(40):
        at = chance.randrange(len(whole))
        damaged = (
            whole[:at] if i % 4 == 0 else whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :]
        )
        file.write_bytes(damaged)
        with pytest.raises(ArtifactError, match=r"model\.safetensors has another"):
            verify(slim)
    assert run(["verify", str(slim)]) == 2
    assert "not as ffncompress wrote it" in capsys.readouterr().err
    assert run(["show", str(slim)]) == 2
    file.write_bytes(whole)
    assert run(["verify", str(slim)]) == 0
    assert "whole" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "ffncompress/plan.json", "ffncompress/origin.json"])
def test_other_files_are_part_of_the_whole(slim: Path, name: str) -> None:
    with (slim / name).open("a") as stream:
        stream.write("\n")
    with pytest.raises(ArtifactError, match="has another size"):
        verify(slim)
    (slim / "extra.safetensors").write_bytes(b"")


def test_a_checkpoint_of_the_release_before_still_loads(slim: Path) -> None:
    """No manifest, no guard in the config, no proof."""
    (slim / MANIFEST_FILE).unlink()
    expected = load(slim)(IDS).logits

    def older(config: dict) -> None:
        ours = config["quantization_config"]
        config.update(ours.pop("activations"))
        ours["format_version"] = 2

    edit(slim / "config.json", older)
    edit(slim / "ffncompress" / "origin.json", lambda o: o.update(ffncompress_version="0.3.0") or o.pop("proof"))
    assert torch.equal(load(slim)(IDS).logits, expected)
    assert run(["show", str(slim)]) == 0
    with pytest.raises(ArtifactError, match="recorded no checksums"):
        verify(slim)


# a wrong model


def test_a_square_ffn_does_not_load_without_the_package(tmp_path: Path, tokenizer) -> None:
    """d_inner = d_model: a dense replacement has the very shape of the stock output matrix."""
    folder = tmp_path / "square"
    config = transformers.LlamaConfig(**{**GATED, "intermediate_size": 32}, initializer_range=0.2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made = api.plan(str(folder), tmp_path / "plan", tokens=2048, seq_len=64, blocks="0,1,2", budget="2x")
    slim = api.compress(tmp_path / "plan", tmp_path / "slim")
    assert len(made.replaced) == 3
    done = run_python(LOAD.format(folder=str(slim)), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode != 0
    assert "pip install ffncompress" in done.stderr.splitlines()[-1]


def test_a_plan_is_not_applied_twice(demo_model, demo_plan: Path, slim: Path) -> None:
    apply_(demo_model, demo_plan)
    after = demo_model(IDS).logits
    with pytest.raises(ModelError, match="not in this model with that shape"):
        apply_(demo_model, demo_plan)
    assert torch.equal(demo_model(IDS).logits, after)
    with pytest.raises(ModelError, match="not in this model with that shape"):
        apply_(load(slim), demo_plan)


def test_a_patched_model_proves_itself(demo_model, demo_plan: Path) -> None:
    with torch.no_grad():
        demo_model.transformer.h[0].attn.c_attn.weight[:, :64] *= 1.5
    before = demo_model(IDS).logits
    with pytest.raises(ModelError, match="does not answer as"):
        apply_(demo_model, demo_plan)
    with pytest.raises(ModelError, match="does not answer as"), patched(demo_model, demo_plan):
        pass
    assert torch.equal(demo_model(IDS).logits, before)  # left as it was


def test_half_precision_proves_itself_too(demo_source, demo_plan: Path) -> None:
    assert apply_(load_model(demo_source, dtype="bfloat16"), demo_plan)(IDS).logits.isfinite().all()


def test_every_layers_layout_is_checked() -> None:
    """As in a hybrid family: a later layer puts a norm between its FFN and the stream."""
    model = tiny_model("llama")
    layer = model.model.layers[2]
    own = layer.forward

    def normed(*args, **kwargs):
        after, layer.mlp.forward = layer.mlp.forward, lambda x: torch.zeros_like(x)
        silent = own(*args, **kwargs)
        layer.mlp.forward = after
        spoken = own(*args, **kwargs)
        return silent + torch.nn.functional.rms_norm(spoken - silent, spoken.shape[-1:])

    assert len(find_blocks(model)) == 3
    layer.forward = normed
    found = find_ffns(model)
    assert len(found.blocks) == 2
    assert set(found.kept) == {2}


# reading files


def test_a_received_plan_opens_nobodys_files(slim: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("The password of the treasury is swordfish, and nobody else may know of it. " * 400)
    for source in (str(secret), "secret.txt", f"hub:{tmp_path}::train:text"):
        edit(slim / "ffncompress" / "plan.json", lambda p, s=source: p["fit_text"][0].update(source=s))
        Manifest.write(slim, "checkpoint")
        with pytest.raises(TextError, match="--data"):
            api.evaluate(slim, tokens=600)
    assert not any(b"swordfish" in file.read_bytes() for file in slim.rglob("*") if file.is_file())


def test_a_text_that_changed_is_no_longer_the_plans(short_demo: Path, tmp_path: Path) -> None:
    source = tmp_path / "mine.txt"
    source.write_text("\n\n".join(read("stories").documents[:150]))
    api.plan(str(short_demo), tmp_path / "plan", data=[str(source)], tokens=1024, blocks="1", refit=False)
    slim = api.compress(tmp_path / "plan", tmp_path / "slim")
    assert api.evaluate(slim, tokens=600, repeats=1, max_delta="500%").main.text == "mine.txt"
    source.write_text("swordfish " + source.read_text())
    with pytest.raises(TextError, match=r"mine\.txt: no longer the text.*--data"):
        api.evaluate(slim, tokens=600)


def test_the_notebook_takes_fingerprints_only(tmp_path: Path) -> None:
    record_place("../../escape", tmp_path)
    assert recorded_place("../../escape") is None
    record_place("a" * 64, tmp_path)
    assert recorded_place("a" * 64) == str(tmp_path)


# what leaves


def test_nothing_that_is_uploaded_holds_a_path(short_demo: Path, tmp_path: Path) -> None:
    mine = tmp_path / "home" / "ada" / "zwieback"
    shutil.copytree(short_demo, mine / "model")
    (mine / "diary.txt").write_text("\n\n".join(read("stories").documents[:150]))
    (mine / "other.txt").write_text("\n\n".join(read("stories").documents[200:220]))
    recipe = mine / "r.yaml"
    recipe.write_text(
        f"model: {mine / 'model'}\noutput: {mine / 'slim'}\n"
        f"plan: {{tokens: 1024, blocks: '0,2', data: [{mine / 'diary.txt'}]}}\n"
        f"eval: {{tokens: 600, repeats: 1, max_delta: 500%, also: [{mine / 'other.txt'}]}}\n"
    )
    api.run(recipe)
    (mine / "slim" / "notes.txt").write_text("mine")
    leaves = [mine / "slim" / name for name in uploaded(Manifest.read(mine / "slim"))]
    assert {"model.safetensors", "gate.json", "plan.json", "recipe.yaml", "README.md"} <= {file.name for file in leaves}
    assert mine / "slim" / "notes.txt" not in leaves
    api.profile(str(mine / "model"), mine / "report", data=[str(mine / "diary.txt")], tokens=1024, swaps=False)
    leaves += [file for folder in ("slim-plan", "report") for file in (mine / folder).rglob("*") if file.is_file()]
    for file in leaves:
        content = file.read_bytes()
        for part in (str(tmp_path), "/ada", "zwieback"):
            assert part.encode() not in content, file
    assert "diary.txt" in (mine / "slim" / "ffncompress" / "plan.json").read_text()


# identity


def test_the_base_is_known_by_config_and_tokenizer_too(tmp_path: Path, demo_source, demo_plan: Path) -> None:
    copy = shutil.copytree(demo_source.directory, tmp_path / "copy")
    edit(copy / "config.json", lambda c: c.update(activation_function="relu"))
    with pytest.raises(ModelError, match="not the weights, config and tokenizer"):
        api.compress(demo_plan, tmp_path / "out", model=str(copy))
    other = shutil.copytree(demo_source.directory, tmp_path / "other")

    def swap_ids(tokens: dict) -> None:
        vocabulary = tokens["model"]["vocab"]
        first, second = list(vocabulary)[300:302]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    edit(other / "tokenizer.json", swap_ids)
    with pytest.raises(ModelError, match="not the weights, config and tokenizer"):
        api.compress(demo_plan, tmp_path / "out", model=str(other))


def test_a_name_is_believed_in_the_hubs_cache_only(tmp_path: Path, demo_source, monkeypatch) -> None:
    from huggingface_hub import constants

    name = "0" * 64

    def laid_out(blobs: Path) -> str:
        folder = shutil.copytree(demo_source.directory, blobs.parent / "snapshots" / "x")
        blobs.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").rename(blobs / name)
        (folder / "model.safetensors").symlink_to(blobs / name)
        return find_model(str(folder)).fingerprint()

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    outside = laid_out(tmp_path / "elsewhere" / "models--a--b" / "blobs")
    inside = laid_out(tmp_path / "hub" / "models--a--b" / "blobs")
    assert outside == demo_source.fingerprint()
    assert inside != outside


def test_a_plan_of_the_release_before_still_applies(tmp_path: Path, demo_source, plan: Path) -> None:
    """Schema 2 as 0.3.0 wrote it: weights alone are the fingerprint, and names are paths."""

    def older(p: dict) -> None:
        p["ffncompress_version"] = "0.3.0"
        del p["proof"]
        for name in ("fingerprint_of", "is_hub"):
            del p["base"][name]
        p["base"].update(name=str(demo_source.directory), fingerprint=demo_source.weights_fingerprint())

    edit(plan / "plan.json", older)
    slim = api.compress(plan, tmp_path / "slim")
    assert str(demo_source.directory) not in (slim / "ffncompress" / "plan.json").read_text()


# presentation


def test_nothing_shown_is_obeyed(plan: Path, slim: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m \u202e<script>alert(1)</script> [link=x](http://x) |`"
    edit(plan / "plan.json", lambda p: p.update(summary=evil) or p["base"].update(name=evil))
    assert run(["show", str(plan)]) == 0
    out = capsys.readouterr().out
    assert not any(c in out for c in "\x1b\x07\x9b\u202e")
    assert "owned" in out
    edit(slim / "ffncompress" / "plan.json", lambda p: p["base"].update(name=evil))
    (slim / "ffncompress" / "recipe.yaml").unlink(missing_ok=True)
    Manifest.write(slim, "checkpoint")
    api.evaluate(slim, tokens=600, repeats=1, max_delta="500%", model="demo", data="stories")
    body = (slim / "README.md").read_text().split("---", 2)[2]
    assert "<script>" not in body
    assert "](http" not in body
    assert "\x1b" not in body


def test_words() -> None:
    assert plain("a\x1b[1mb\n\tc\u200b") == "a�[1mb\n\tc�"
    assert in_markdown("a|b\n# <i>") == r"a\|b \# &lt;i&gt;"


def test_an_edited_card_is_left_alone(slim: Path) -> None:
    (slim / "README.md").write_text("my own words")
    api.evaluate(slim, tokens=600, repeats=1, max_delta="500%")
    assert (slim / "README.md").read_text() == "my own words"
    assert verify(slim)


def test_a_yaml_bomb_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    for text, match in (("\n".join(lines), "aliases"), ("[" * 20_000, "not"), ("x" * 200_000, "longer than")):
        file.write_text(text)
        with pytest.raises(RecipeError, match=match):
            Recipe.read(file)
