"""The base model of a plan, found again: by its fingerprint, wherever it lies now."""

from __future__ import annotations

from ffncompress.errors import ModelError
from ffncompress.models.sources import EMBEDDED, ModelSource, find_model
from ffncompress.records.plan import BaseRef
from ffncompress.storage.registry import recorded_place


def find_base(base: BaseRef, model_name: str | None = None, *, trust_remote_code: bool = False) -> ModelSource:
    """A plan's base model on this disk, checked by its fingerprint.

    Args:
        base: names the model, and may say that it needs code of its own; it cannot allow it.
        model_name: where the model is, if not where it was.
        trust_remote_code: the person's own word that the model's code may run.

    Raises:
        ModelError: it is not found, it is another one, or it needs code that nobody allowed.
    """
    if base.trust_remote_code and not trust_remote_code:
        raise ModelError(
            f"{base.name} runs code that comes with it, which a plan cannot allow; look at that code, and if you trust "
            "it pass --trust-remote-code (in Python: trust_remote_code=True)"
        )
    name = model_name or _recorded_name(base)
    try:
        revision = base.revision if model_name is None else None
        source = find_model(name, revision=revision, trust_remote_code=trust_remote_code)
    except ModelError as error:
        if model_name is not None:
            raise
        raise ModelError(f"the plan's base model is not found ({error}); say where it is with --model") from error
    known = source.fingerprint() if base.fingerprint_of == "model" else source.weights_fingerprint()
    if known != base.fingerprint:
        at = f" at revision {base.revision}" if base.revision else ""
        raise ModelError(
            f"{name}: these are not the weights, config and tokenizer that the plan was made for ({base.name}{at}); "
            "give the right model or revision, or make a new plan"
        )
    return source


def _recorded_name(base: BaseRef) -> str:
    """Where a plan's base is to be looked for: on the Hub, or where this machine saw it last.

    Raises:
        ModelError: this machine never saw it.
    """
    if base.is_hub is not False or base.name == EMBEDDED:  # plans before 0.4 have a path for a name
        return base.name
    place = recorded_place(base.fingerprint)
    if place is None:
        raise ModelError(
            f"the plan was made for {base.name}, a model that this machine has not seen; say where it is with --model"
        )
    return place
