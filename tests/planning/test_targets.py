"""Kinds and targets: what is on offer, and what it costs where the model is to run."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TINY, tiny_model
from library.small_models import small_model

from ffncompress import api
from ffncompress.budgets import KINDS, parse_kinds
from ffncompress.errors import BudgetError, FfncompressError
from ffncompress.models import find_blocks
from ffncompress.planning.menus import menu_shapes
from ffncompress.planning.spending import check_menus
from ffncompress.planning.targets import folded_parameters, terms_of
from ffncompress.recipe import Recipe
from ffncompress.records.plan import Plan, Shape
from ffncompress.replacement.fitting import Offer, fit_names, menu_widths
from ffncompress.settings import PlanSettings

QUICK = {"tokens": 2048, "seq_len": 64}


def test_kinds_are_read() -> None:
    assert parse_kinds(None) == set(KINDS)
    assert parse_kinds("linear") == {"dense", "low-rank", "constant"}
    assert parse_kinds("Neurons, hybrid") == {"neurons", "hybrid"}
    with pytest.raises(BudgetError, match="linear, dense"):
        parse_kinds("quadratic")
    with pytest.raises(BudgetError):
        parse_kinds("")


def test_the_menu_holds_what_is_on_offer() -> None:
    block = find_blocks(tiny_model("llama"))[0]
    for kinds in (frozenset({"neurons"}), frozenset({"hybrid", "dense"}), parse_kinds("linear")):
        offer = Offer(kinds, align=8)
        assert {shape.kind for shape in menu_shapes(block, offer)} == kinds
        assert all(shape.width % 8 == 0 for shape in menu_shapes(block, offer))
    assert fit_names(block, Offer(parse_kinds("linear"))) == ["plain", "stream"]
    assert menu_widths(block, range(1, 16), Offer(align=32, width=72)) == [32, 64, 72]


def test_a_folded_bypass_is_neurons() -> None:
    block = find_blocks(tiny_model("llama"))[0]
    row = 3 * 32
    assert folded_parameters(Shape("neurons", 64), block, 32) == 64 * row
    assert folded_parameters(Shape("neurons", 48), block, 32) == 64 * row  # padded
    assert folded_parameters(Shape("hybrid", 56, 8), block, 32) == 64 * row + 64 + 32
    assert folded_parameters(Shape("dense", rank=32), block, 32) == 3 * 32 * 32 + 32 + 32
    assert folded_parameters(Shape("low-rank", rank=4), block, 1) == 4 * row + 4 + 32
    assert folded_parameters(Shape("constant"), block, 32) == 32 * row + 32 + 32  # no runtime takes a width of 0


@pytest.mark.parametrize(
    ("target", "family", "kinds"),
    [
        ("gguf", "llama", set(KINDS)),
        ("gguf", "qwen2", set(KINDS)),
        ("vllm", "llama", set(KINDS)),
        ("vllm", "qwen2", set(KINDS)),
        ("gguf", "qwen3", None),
        ("gguf", "gpt2", None),
        ("gguf", "gemma", None),
        ("gguf", "mistral", None),  # with a sliding window, as the tiny one is
        ("vllm", "gpt_neox", None),
        *(("native", family, {"neurons"}) for family in ("gpt2", "gpt_neox", "llama", "qwen3", "gemma", "smollm3")),
    ],
)
def test_each_target_takes_what_it_can_express(target: str, family: str, kinds: set[str] | None) -> None:
    model = tiny_model(family)
    settings = PlanSettings(target=target)
    if kinds is None:
        with pytest.raises(BudgetError, match="--native"):
            terms_of(model.config, find_blocks(model), settings)
        return
    terms = terms_of(model.config, find_blocks(model), settings)
    assert terms.offer.kinds == kinds
    assert terms.offer.align == 32
    assert (terms.price is None) == (target == "native")


def test_vllm_gives_every_projection_a_bias_where_one_needs_it() -> None:
    model = tiny_model("llama")
    blocks = find_blocks(model)
    for shape, width in ((Shape("neurons", 40), 64), (Shape("hybrid", 17, 3), 32)):
        price = terms_of(model.config, blocks, PlanSettings(target="vllm")).price
        assert price(shape, blocks[0]) == width * 3 * 32 + 2 * width + 32
    neurons = terms_of(model.config, blocks, PlanSettings(target="vllm", kinds="neurons")).price
    assert neurons(Shape("neurons", 40), blocks[0]) == 64 * 3 * 32


def test_no_constant_where_nothing_would_stop_a_load_without_the_package() -> None:
    """Bloom's config names no activation, by which others are made unloadable; NeoMME's takes no other than its own."""
    for family, offered in (("bloom", False), ("llama", True), ("neomme", False)):
        model = tiny_model(family) if family in TINY else small_model(family)
        assert ("constant" in terms_of(model.config, find_blocks(model), PlanSettings()).offer.kinds) is offered


def test_neurons_that_are_tied_together_are_not_kept() -> None:
    """BitNet has a norm among its neurons: with fewer of them, the others would not be what they were."""
    model = small_model("bitnet")
    blocks = find_blocks(model)
    neurons = PlanSettings(kinds="neurons")
    menus = [[] for block in blocks if not menu_shapes(block, terms_of(model.config, blocks, neurons).offer)]
    with pytest.raises(BudgetError, match=r"block 0: its neurons are tied together.* name linear with --kinds too"):
        check_menus(blocks, menus, neurons)
    with pytest.raises(BudgetError, match="--native keeps neurons, and those of block 0 are tied together"):
        terms_of(model.config, blocks, PlanSettings(target="native"))


def test_tied_qwen3_takes_neurons() -> None:
    model = tiny_model("qwen3")
    model.config.tie_word_embeddings = True
    blocks = find_blocks(model)
    assert terms_of(model.config, blocks, PlanSettings(target="gguf")).offer.kinds == {"neurons"}
    with pytest.raises(BudgetError, match="leave out --kinds"):
        terms_of(model.config, blocks, PlanSettings(target="gguf", kinds="linear"))


def test_settings_come_from_recipes_too(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: demo\noutput: out\nplan:\n  native: true\n  kinds: neurons\n  align: 64\n")
    plan = Recipe.read(file)[0].plan
    assert (plan.target, plan.kinds, plan.alignment) == ("native", "neurons", 64)
    file.write_text("model: demo\noutput: out\nplan:\n  kinds: square\n")
    with pytest.raises(FfncompressError, match=r"line 4: .*not a kind"):
        Recipe.read(file)


@pytest.mark.slow
def test_linear_at_8x_is_the_papers_method(short_demo: Path, tmp_path: Path) -> None:
    plan = api.plan(
        str(short_demo), tmp_path / "plan", kinds="linear", budget="8x", blocks="0,2", data=["stories"], tokens=2048
    )
    assert {option.kind for block in plan.blocks for option in block.options} == parse_kinds("linear")
    assert all(block.choice.rank and not block.choice.width for block in plan.replaced)
    assert Plan.load(tmp_path / "plan").settings.kinds == "linear"
    with pytest.raises(BudgetError, match="1/40"):
        api.plan(str(short_demo), tmp_path / "none", kinds="dense", budget="40x", data=["stories"], tokens=2048)


@pytest.mark.slow
def test_a_budget_counts_what_the_target_counts(tiny_folder, tmp_path: Path) -> None:
    plan = api.plan(str(tiny_folder("llama-tied")), tmp_path / "plan", target="gguf", budget="-5%", align=8, **QUICK)
    assert plan.parameters_at_target <= 0.95 * plan.base.parameters
    assert plan.parameters_after <= plan.parameters_at_target
    assert all(option.price is not None for block in plan.blocks for option in block.options)
    assert plan.final_check is not None
    api.compress(tmp_path / "plan", tmp_path / "slim")  # its own checkpoint is as ever
