"""One of each row of the table, and what has none, from a plan to tokens: reloaded as a stranger would."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from fresh_process import LOAD, run_python
from library.small_models import small_model
from transformers.quantizers import auto

from ffncompress import api, load
from ffncompress.errors import ModelError
from ffncompress.modeling_ffncompress import METHOD
from ffncompress.models.families import ROWS
from ffncompress.records.task import AUTO_CLASSES
from ffncompress.text.sources import read

pytestmark = pytest.mark.slow

# what has no row
UNLISTED = (
    "bitnet", "esm", "falcon_h1", "gemma3n_text", "gemma4_text", "jamba", "nemotron_h", "olmo_hybrid", "openai-gpt",
    "qwen2_moe", "xlnet",
)  # fmt: skip
ONE_OF_EACH = tuple(names.split()[0] for _, names in ROWS)  # benchmarks/architectures.py takes them all
POPULAR = ("falcon", "gemma3_text", "olmo2", "phi3", "opt", "qwen3", "roberta", "modernbert-decoder")
IDS = torch.arange(5, 25)[None]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tokenizer, tmp_path: Path) -> Path:
    """A random model of the family, as a folder, with a tokenizer that can hide words."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(5)
    small_model(request.param).save_pretrained(tmp_path / request.param)
    tokenizer.save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One document, so that nobody has to find out how a model reads several."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(read("stories").joined[:200_000])
    return file


def slimmed(folder: Path, text: Path, **settings: object) -> tuple[api.Plan, Path]:
    """A plan of two of its blocks, and the checkpoint that comes of it, which `apply` compares with the model."""
    settings = {"tokens": 1024, "seq_len": 64, "context": 64, "refit": False, "data": [str(text)], **settings}
    plan = api.plan(str(folder), folder.parent / "plan", budget="3x", blocks="0,1", **settings)
    return plan, api.compress(folder.parent / "plan", folder.parent / "slim")


@contextmanager
def without_plugin() -> Iterator[None]:
    """As where the package is missing: transformers knows no quantizer of our name, and goes on without."""
    maps = (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    own = [each.pop(METHOD) for each in maps]
    try:
        yield
    finally:
        for each, value in zip(maps, own, strict=True):
            each[METHOD] = value


@pytest.mark.parametrize("folder", [*ONE_OF_EACH, *POPULAR, *UNLISTED], indirect=True)
def test_a_family_from_plan_to_tokens(folder: Path, text: Path) -> None:
    plan, slim = slimmed(folder, text)
    assert [block.index for block in plan.replaced] == [0, 1]
    model = load(slim)
    with torch.inference_mode():
        found = model(IDS).logits.double().sum().item()
    if plan.base.task == "causal":
        assert model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False).shape == (1, 25)
    load_it = LOAD.replace("AutoModelForCausalLM", AUTO_CLASSES[plan.base.task]).format(folder=str(slim))
    done = run_python(load_it)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split("SUM")[1]) == pytest.approx(found, rel=1e-4, abs=1e-2)
    with without_plugin(), pytest.raises((KeyError, RuntimeError, ValueError)):
        getattr(transformers, AUTO_CLASSES[plan.base.task]).from_pretrained(slim)


@pytest.mark.parametrize("kind", ["neurons", "hybrid", "low-rank", "dense", "constant"])
@pytest.mark.parametrize("folder", ["bert"], indirect=True)
def test_every_kind_inline(kind: str, folder: Path, text: Path) -> None:
    plan, slim = slimmed(folder, text, kinds="linear" if kind in ("low-rank", "dense", "constant") else kind)
    assert plan.replaced
    assert load(slim)(IDS).logits.isfinite().all()


@pytest.mark.parametrize("folder", ["bert"], indirect=True)
@pytest.mark.parametrize("task", ["masked", "embedding"])
def test_an_encoder_goes_all_the_way(task: str, folder: Path, text: Path) -> None:
    if task == "embedding":
        small_model("bert", transformers.AutoModel).save_pretrained(folder)
    plan, slim = slimmed(folder, text)
    assert plan.base.task == task
    result = api.evaluate(slim, tokens=512, repeats=1, max_delta="500%")
    assert result.task == task
    with pytest.raises(ModelError, match="tasks are for models that go on with a text"):
        api.evaluate(slim, tokens=512, repeats=1, tasks=["arc_easy"])
    if task == "embedding":
        assert result.main.base.token == 1.0  # the original lies where it lies
        assert 1.0 < result.main.slimmed.token < 1.5
    study = api.profile(str(folder), folder.parent / "report", tokens=1024, seq_len=64)
    assert len(study.profiles[0].blocks) == 3


def test_a_sentence_encoder_keeps_what_makes_it_one(tmp_path: Path, tokenizer, text: Path) -> None:
    """How sentence-transformers pools and norms, and how much it reads, goes along; nothing else of the folder does."""
    folder = tmp_path / "encoder"
    small_model("bert", transformers.AutoModel).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    for name in (
        "modules.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
        "1_Pooling/code.py",
        "other.json",
    ):
        (folder / name).write_text("{}")
    _, slim = slimmed(folder, text)
    kept = {str(file.relative_to(slim)) for file in slim.rglob("*")}
    assert {"modules.json", "sentence_bert_config.json", "1_Pooling/config.json"} <= kept
    assert not {"1_Pooling/code.py", "other.json"} & kept
