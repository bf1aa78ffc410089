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
    if stated.get("is_encoder_decoder") is True and not _is_causal(name, model_type):
        raise ModelError(
            f"{model_type}: an encoder-decoder; what it loses shows on pairs of texts, a source and what is made of "
            "it, which no gate here measures; give a decoder or an encoder"
        )
    return getattr(transformers, AUTO_CLASSES[_task(name, model_type)])


def _task(name: str, model_type: str) -> Task:
    """By the name of a class; of one that transformers does not have, a causal language model."""
    from transformers.models.auto import modeling_auto as auto

    if _is_causal(name, model_type) or model_type not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "causal"
    heads = (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES)
    if any(_has(each, name, model_type) for each in heads):
        return "masked"
    # without a head, of a family that has masked language models: a sentence encoder
    return "embedding" if _has(auto.MODEL_MAPPING_NAMES, name, model_type) else "causal"


def _is_causal(name: str, model_type: str) -> bool:
    from transformers.models.auto import modeling_auto as auto

    return _has(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, name, model_type)


def _has(mapping: Mapping[str, Any], name: str, model_type: str) -> bool:
    kinds = mapping.get(model_type, ())
    return name in ((kinds,) if isinstance(kinds, str) else kinds)
