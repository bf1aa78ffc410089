"""What a model is for, and what the number is called that a change of it is judged by."""

from __future__ import annotations

from typing import Literal

Task = Literal["causal", "masked", "embedding"]
MEASURES: dict[Task, str] = {
    "causal": "perplexity",
    "masked": "pseudo-perplexity",
    "embedding": "exp(1 - cosine)",  # of embeddings before and after: 1.00 is no change at all
}
AUTO_CLASSES: dict[Task, str] = {  # transformers' own, that loads such a model
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "embedding": "AutoModel",
}
UNTIMED = "speed was not measured: weights were read from disk while the models ran"
