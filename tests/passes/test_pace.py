"""Speed: what is counted against counts by hand, a model in another dtype and back, turns."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import mixed_model, tiny_model
from library.small_models import small_model

from ffncompress.gate.beside import measure_speed
from ffncompress.models import ffn_of, find_blocks, forward, install_
from ffncompress.passes import pace
from ffncompress.records.plan import Shape
from ffncompress.replacement.modules import build
from ffncompress.runtime.progress import silent
from ffncompress.settings import EvalSettings

D, INNER, LAYERS, VOCABULARY, KV = 32, 96, 3, 3072, 16  # of a tiny Llama
WEIGHTS = LAYERS * (2 * D * D + 2 * D * KV + 3 * D * INNER) + VOCABULARY * D  # in matrices, the head's too


def slimmed(family: str = "llama", width: int = 32) -> torch.nn.Module:
    model = tiny_model(family)
    blocks = find_blocks(model)
    return install_(model, {b.path: build(Shape("neurons", width), b.layout, ffn_of(model, b)) for b in blocks})


@pytest.mark.parametrize("tokens", [1, 64])
def test_operations_are_those_of_matrices_and_attention(tokens: int) -> None:
    ids = torch.arange(3, 3 + tokens)[None]
    attention = 2 * 2 * D * LAYERS * tokens**2
    assert pace.operations(tiny_model("llama"), ids) == 2 * tokens * WEIGHTS + attention
    less = 2 * tokens * LAYERS * 3 * D * (INNER - 32)
    assert pace.operations(slimmed(), ids) == 2 * tokens * WEIGHTS + attention - less


def test_operations_of_other_kinds_of_matrices() -> None:
    """GPT-2's lie the other way round; of routed experts, those count that a token takes."""
    ids = torch.arange(3, 35)[None]
    gpt2 = LAYERS * (4 * D * D + 8 * D * D) + VOCABULARY * D
    assert pace.operations(tiny_model("gpt2"), ids) == 2 * 32 * gpt2 + 4 * D * LAYERS * 32**2
    one, two = (small_model("mixtral"), small_model("mixtral"))
    for module in two.modules():
        if hasattr(module, "top_k"):
            assert module.top_k == 2
            module.top_k = 1
    experts = 2 * 32 * LAYERS * 3 * D * INNER
    assert pace.operations(one, ids) - pace.operations(two, ids) == experts


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_bytes_are_of_weights_that_a_token_needs(family: str) -> None:
    """A table that is the head too is read whole; one that is not gives a row."""
    norms = (2 * LAYERS + 1) * D
    model = tiny_model(family)
    assert pace.bytes_read(model) == 4 * (WEIGHTS + norms)
    assert pace.bytes_read(model.to(torch.bfloat16)) == 2 * (WEIGHTS + norms)


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "opt"])
def test_another_dtype_and_back(family: str) -> None:
    model, ids = mixed_model(family), torch.arange(3, 19)[None]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode(), pace.in_dtype(model, torch.bfloat16):
        assert forward(model, ids).logits.dtype == torch.bfloat16
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3_text", "bloom"])
def test_going_on_is_with_the_cache(family: str) -> None:
    """One token at a time, what was before from the cache: the same logits as of all at once."""
    model, ids = tiny_model(family), torch.arange(3, 23)[None]
    assert pace.keeps_cache(model)
    state, got = pace._read(model, ids[:, :16], None), []
    for i in range(16, 20):
        made = model(input_ids=ids[:, i : i + 1], past_key_values=state, use_cache=True)
        state = made.past_key_values
        got.append(made.logits[:, -1])
    torch.testing.assert_close(torch.stack(got, 1), forward(model, ids).logits[:, 16:], rtol=1e-3, atol=1e-4)
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))
    assert pace.seconds_to_go_on(model, ids, 3) > 0
    assert seen[1:] == [1, 1, 1]


def test_turns_are_interleaved_and_the_first_warms_up() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    taken = pace.in_turns({name: lambda name=name: run(name) for name in "ab"}, 2, silent, "")
    assert "".join(order) == "ababab"
    assert taken == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_both_models_in_every_use_and_dtype() -> None:
    base, slim = tiny_model("llama"), slimmed()
    settings = EvalSettings(batch_size=2, repeats=2, speed_dtypes=["bfloat16", "float32"])
    speed = measure_speed(base, slim, 32, settings, silent)
    uses = ["prefill 2 x 32", "prefill 1 x 32", "decode 1 x 1"]
    assert [each.what for each in speed.paces] == [f"{u}, {d}" for d in ("float32", "bfloat16") for u in uses]
    for each in speed.paces:
        assert each.spread[0] <= each.ratio <= each.spread[1]
        assert each.base > 0
    read, one, on = speed.paces[:3]
    ids = torch.zeros(1, 32, dtype=torch.long)
    assert read.predicted == one.predicted == pace.operations(base, ids) / pace.operations(slim, ids)
    assert on.predicted == pace.bytes_read(base) / pace.bytes_read(slim)
    assert (speed.base, speed.ratio, speed.batch) == (read.base, read.ratio, read.batch)


@pytest.mark.parametrize("kind", [transformers.AutoModelForMaskedLM, transformers.AutoModel])
def test_an_encoder_only_reads(kind: type) -> None:
    model = small_model("bert", kind)
    speed = measure_speed(model, model, 16, EvalSettings(batch_size=1, repeats=1), silent)
    assert [each.what for each in speed.paces] == ["prefill 1 x 16, float32"]
    assert speed.paces[0].predicted == 1
