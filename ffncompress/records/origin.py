"""What a checkpoint says of itself, as data: origin.json."""

from __future__ import annotations

from dataclasses import dataclass

from ffncompress.records.plan import Proof
from ffncompress.schema import Count, Positive, Record
from ffncompress.settings import HealWhat
from ffncompress.text.sources import TextRef

MOVED: dict[HealWhat, str] = {
    "replaced": "the replacements",
    "all": "all weights but embeddings and head",
    "lora": "the replacements and adapters beside the other linear layers",
}


@dataclass(frozen=True)
class Healing:
    """What healing did: perplexities on the choose text. What has a default, earlier releases did not record."""

    minutes: float
    steps: Count
    tokens: Count
    original: float
    closed_form: float
    healed: float
    kept: bool
    what: HealWhat = "replaced"
    rate: float | None = None
    seconds: float | None = None  # that these steps took

    @property
    def pace(self) -> float | None:
        """Tokens in a second."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def moved(self) -> str:
        """What was trained, in words."""
        return MOVED[self.what]


class Origin(Record):
    """What `apply` recorded of a checkpoint that it emitted."""

    ffncompress_version: str
    base_model: str
    base_revision: str | None
    base_fingerprint: str
    base_licence: str | None
    base_is_hub: bool
    base_bytes: Count
    parameters_before: Positive
    parameters_after: Positive
    fit_text: list[TextRef]
    choose_text: list[TextRef]
    healing: Healing | None = None
    proof: Proof | None = None
