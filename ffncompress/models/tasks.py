"""What a model is for: to go on with a text, to fill in hidden words, or to embed what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ffncompress.errors import ModelError
from ffncompress.records.task import AUTO_CLASSES, Task
from ffncompress.type_aliases import Json, Model


def task_of(model: Model) -> Task:
    """What a loaded model is for, by its class."""
    return _task(type(model).__name__, getattr(model.config, "model_type", ""))


def auto_class(stated: Mapping[str, Json]) -> Any:
    """transformers' class that loads a model whose config.json says this.

    Raises:
        ModelError: it is of a kind that no gate here measures.
    """
    import transformers

    names, model_type = stated.get("architectures"), str(stated.get("model_type", ""))
    name = str(names[0]) if isinstance(names, list) and names else ""
    task = _task(name, model_type)
    if stated.get("is_encoder_decoder") is True and task != "causal":
        raise ModelError(
            f"{model_type}: an encoder-decoder; what it loses shows on pairs of texts, a source and what is made of "
            "it, which no gate here measures; give a decoder or an encoder"
        )
    return getattr(transformers, AUTO_CLASSES[task])


def _task(name: str, model_type: str) -> Task:
    """By the name of a class; of one that transformers does not have, a causal language model."""
    from transformers.models.auto import modeling_auto as auto

    def has(mapping: Mapping[str, Any]) -> bool:
        kinds = mapping.get(model_type, ())
        return name in ((kinds,) if isinstance(kinds, str) else kinds)

    if has(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        return "causal"
    if model_type not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "causal"
    if has(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) or has(auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES):
        return "masked"
    # without a head, of a family that has masked language models: a sentence encoder
    return "embedding" if has(auto.MODEL_MAPPING_NAMES) else "causal"
