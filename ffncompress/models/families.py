"""The table of families: what an FFN is made of, where it lies in a layer, and how its output joins the stream.

A row is a description, and every one is tried on a forward pass, layer by layer, before it is believed (trying.py). A
model type without a row is looked at, and a description made of what is seen (looking.py): so a row is not needed for a
model to work, but says that it is tested.
"""

from __future__ import annotations

from dataclasses import dataclass

from ffncompress.errors import ModelError


@dataclass(frozen=True)
class Layout:
    """What an FFN is made of, by the names that its parts have below its path.

    With a module of its own, a path is that module's, and it is replaced whole. Without one, the path is what the parts
    lie in among others, they are replaced one by one, and the activation between them has to be one of them.
    """

    inner: tuple[str, ...]  # the matrices that lead in: one, or a gate and an up
    out: str  # the matrix that leads out
    fused: int = 1  # how many of them stand above one another in one matrix
    activation: str | None = None  # the module between, of an FFN without a module of its own, or around what leads in

    @property
    def leads(self) -> int:
        """How many rows of matrices lead into one neuron."""
        return len(self.inner) * self.fused


@dataclass(frozen=True)
class Family:
    """Where in a layer its FFN is, what it is made of, and what stands between it and the residual stream."""

    place: str  # below the layer; empty: the layer itself
    layout: Layout
    after: str | None = None  # a norm of the FFN's output, before it is added
    gate: str | None = None  # a matrix of one row, whose sigmoid scales what is added, token by token
    tied: bool = False  # its neurons do not stand each for itself: it can go, but not a part of it
    stream: str | None = None  # what the stream enters first with the contribution in it; none: it leaves the layer


GPT2 = Layout(("c_fc",), "c_proj")
NEOX = Layout(("dense_h_to_4h",), "dense_4h_to_h")
GATED = Layout(("gate_proj", "up_proj"), "down_proj")
FUSED = Layout(("gate_up_proj",), "down_proj", fused=2)
UNGATED = Layout(("up_proj",), "down_proj")
TWO = Layout(("fc1",), "fc2")
INLINE = Layout(("fc1",), "fc2", activation="activation_fn")
BERT = Layout(("intermediate.dense",), "output.dense", activation="intermediate.intermediate_act_fn")

# a description, and the model types (as config.json names them) that it is true of
ROWS: tuple[tuple[Family, str], ...] = (
    (Family("mlp", GPT2), "gpt2 gpt_bigcode gpt_neo starcoder2"),
    (Family("mlp", NEOX), "gpt_neox falcon persimmon"),
    (
        Family("mlp", GATED),
        "cohere cohere2 diffllama ernie4_5 gemma granite helium hunyuan_v1_dense llama ministral "
        "ministral3 mistral olmo qwen2 qwen3 qwen3_5_text seed_oss smollm3 stablelm",
    ),
    (Family("mlp", GATED, after="post_feedforward_layernorm"), "exaone4 gemma2 gemma3 gemma3_text olmo2 olmo3"),
    (Family("mlp", FUSED), "glm phi3"),
    (Family("mlp", FUSED, after="post_mlp_layernorm"), "glm4"),
    (Family("mlp", UNGATED), "apertus arcee jais2 nemotron"),
    (Family("mlp", TWO), "nanochat phi"),
    (Family("mlp", Layout(("fc_in",), "fc_out")), "codegen gptj"),
    (Family("mlp", Layout(("Wi",), "Wo", fused=2)), "modernbert modernbert-decoder"),
    (Family("mlp", Layout(("dense_h_to_4h",), "dense_4h_to_h", activation="gelu_impl")), "bloom"),
    (Family("ffn", Layout(("up_proj",), "down_proj", activation="act")), "mpt"),
    (Family("feed_forward", GATED), "bamba"),
    (Family("feed_forward", Layout(("w1", "w3"), "w2")), "lfm2"),
    (Family("mlp_block", GATED), "recurrent_gemma"),
    (Family("", INLINE), "biogpt opt xglm"),
    (Family("", BERT, stream="output.LayerNorm"), "bert camembert deberta-v2 electra mpnet roberta xlm-roberta"),
    (Family("ffn", Layout(("lin1",), "lin2"), stream="output_layer_norm"), "distilbert"),
)
FAMILIES = {name: family for family, names in ROWS for name in names.split()}


def supported() -> str:
    """The families as a sentence for a person."""
    return ", ".join(sorted(FAMILIES)) + ", and models built like them"


def unsupported(model_type: str, reason: str) -> ModelError:
    """The refusal of a model, with the reason and what is supported."""
    return ModelError(f"{model_type}: {reason}; supported families: {supported()}")
