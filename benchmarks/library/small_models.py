"""Small random models of every architecture that transformers can build so: a config's sizes are made small by name."""

from __future__ import annotations

import inspect

import torch
import transformers
from transformers.models.auto import modeling_auto

VOCABULARY = 3072
LARGEST = 30_000_000  # parameters; what is larger was not made small
SIZES = {
    32: "hidden_size d_model n_embd dim model_dim embedding_size word_embed_proj_dim emb_dim input_hidden_size "
        "kv_lora_rank q_lora_rank embed_dim lru_width attention_hidden_size mamba_d_ssm d_embed embedding_dim",
    96: "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size "
        "encoder_ffn_dim decoder_ffn_dim block_ff_dim hidden_dim dense_intermediate_size expert_ffn_hidden_size "
        "intermediate_size_mlp dim_ff dff inner_dim block_ffn_dim_multiplier_size shared_intermediate_size",
    3: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
       "num_local_experts n_routed_experts mamba_num_heads num_mem_heads num_attention_head",
    2: "num_key_value_heads num_experts_per_tok top_k moe_top_k n_kv_heads num_kv_heads moe_topk num_selects_per_token",
    1: "num_kv_shared_layers n_shared_experts n_group topk_group first_k_dense_replace num_expert_group mamba_n_groups "
       "mamba_expand num_nextn_predict_layers n_groups num_shared_experts moe_num_shared_experts",
    8: "head_dim qk_nope_head_dim v_head_dim qk_rope_head_dim d_kv mamba_d_head mamba_head_dim global_head_dim "
       "hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim state_size mamba_d_state",
    16: "qk_head_dim",
    256: "max_position_embeddings n_positions max_seq_len max_sequence_length seq_length",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
}  # fmt: skip
DERIVED = ("head_dim", "num_key_value_heads", "num_experts_per_tok")  # where a config leaves them to be derived
_SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
# what the names alone do not say
SPECIAL: dict[str, dict[str, object]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "use_mamba_kernels": False, "mamba_dt_rank": 4},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1},
    "zaya": {"num_experts_per_tok": 1},
    "bailing_hybrid": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gptj": {"rotary_dim": 8}, "codegen": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "persimmon": {"hidden_act": "relu2"},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local", "local"], "axial_pos_embds": False},
    "xlnet": {"n_token": VOCABULARY, "d_inner": 96}, "xlm": {"n_words": VOCABULARY},
    "opt": {"word_embed_proj_dim": 32},
    "blt": {"encoder_hash_byte_group_vocab": 8, "hidden_size_global": 32, "patcher_config": {"num_hidden_layers": 1}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 96}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 5},
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"block_sizes": [1, 2], "d_head": 8, "d_inner": 96},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma3n_text": {"intermediate_size": [96, 96, 96], "activation_sparsity_pattern": [0.95, 0.0, 0.0]},
    "kimi_linear": {"num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 8},
    "mamba2": {"num_heads": 8},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "moe"],
                   "moe_shared_expert_intermediate_size": 96},
    "neomme": {"head_dim": 16},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 3, "vocab_size": VOCABULARY},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                       "indexer_compress_ratio": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "num_hidden_layers": 5, "layers_block_type":
              ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": {"attention_hidden_size": 64, "mamba_expand": 2},
}  # fmt: skip
SPECIAL["qwen4_exp"] = SPECIAL["qwen4_exp_text"]


def causal_types() -> list[str]:
    """Every model type that transformers has a causal language model for."""
    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def masked_types() -> list[str]:
    """Every model type that transformers has a masked language model for."""
    return sorted(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def small_config(model_type: str) -> transformers.PreTrainedConfig:
    """A config of a family with all sizes small."""
    kind = transformers.CONFIG_MAPPING[model_type]
    default = kind()
    special = SPECIAL.get(model_type, {})
    wanted = _shrunk(default)
    for name, value in special.items():
        within = wanted.get(name)
        wanted[name] = within | value if isinstance(within, dict) and isinstance(value, dict) else value
    config = kind(**wanted)
    for part in _parts(config):
        for name, value in special.items():
            if hasattr(part, name) and not isinstance(value, dict):
                setattr(part, name, value)
    return config


def _shrunk(config: transformers.PreTrainedConfig) -> dict[str, object]:
    """The arguments of a config's class that make it small, those of its parts within."""
    wanted: dict[str, object] = {}
    depth = 3
    stated = config.to_dict()
    accepted = set(inspect.signature(type(config).__init__).parameters) | set(stated)
    for name, value in stated.items():
        part = vars(config).get(name)
        if isinstance(part, transformers.PreTrainedConfig):
            wanted[name] = {**_shrunk(part), "model_type": part.model_type}
        elif name in _SMALL and (type(value) in (int, float) or (value is None and name in DERIVED)):
            wanted[name] = _SMALL[name]
        elif name in ("layer_types", "layers_block_type", "mlp_layer_types") and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            wanted[name] = [kinds[i % len(kinds)] for i in range(depth)]
        elif name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            wanted[name] = 0
    for old in ("n_embd", "n_layer", "n_head"):
        if old in accepted and old in _SMALL:
            wanted.setdefault(old, _SMALL[old])
    if "kv_lora_rank" in stated and "num_key_value_heads" in wanted:  # latent attention has no groups
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]
    wanted["initializer_range"] = 0.2
    return {name: value for name, value in wanted.items() if name in accepted or name in stated}


def _parts(config: transformers.PreTrainedConfig) -> list[transformers.PreTrainedConfig]:
    return [config, *(v for v in vars(config).values() if isinstance(v, transformers.PreTrainedConfig))]


def small_model(model_type: str, auto: type | None = None) -> torch.nn.Module:
    """A random model of a family, small; of one with masked language models, one of those, unless said otherwise.

    Raises:
        Exception: it cannot be built so, whatever the family's code says of it.
    """
    masked = model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    auto = auto or (transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM)
    config = small_config(model_type)
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    return auto.from_config(config).eval()
