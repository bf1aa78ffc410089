"""Pushing an emitted checkpoint to the Hub, card and all."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ffncompress.checkpoint.card import write_card
from ffncompress.checkpoint.origin import read_gate, read_origin, read_plan, verify_files
from ffncompress.errors import ArtifactError, HubError
from ffncompress.models import find_model
from ffncompress.records.gate import GateResult
from ffncompress.settings import PushSettings
from ffncompress.storage.manifest import MANIFEST_FILE, Manifest


def push_to_hub(directory: str | Path, settings: PushSettings, *, token: str | None = None) -> str:
    """Refresh the card, create the repository if need be, upload; returns the address of the commit.

    The token is handed to huggingface_hub and to nobody else.

    Raises:
        HubError: the gate has not passed on these very weights, or the Hub refused.
    """
    directory = Path(directory)
    origin, plan = read_origin(directory), read_plan(directory)
    manifest = verify_files(directory)
    if manifest is None:
        raise HubError(f"{directory}: made by an earlier release, without checksums; emit it again and evaluate it")
    gate = _passed_gate(directory, settings.force)
    manifest = manifest.record(directory, write_card(directory, plan, origin, gate, settings.repo, manifest=manifest))

    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        api.create_repo(settings.repo, private=settings.private, exist_ok=True)
        # just what we wrote: whatever else somebody put into the folder stays at home
        commit: Any = api.upload_folder(
            repo_id=settings.repo, folder_path=directory, commit_message=settings.message,
            allow_patterns=uploaded(manifest),
        )  # fmt: skip
    except Exception as error:  # huggingface_hub, its HTTP client and the socket each have their own
        raise HubError(
            f"{settings.repo}: the upload failed ({_without_token(error, token)}); "
            "check the name, your rights and the network, and log in with: hf auth login"
        ) from error
    return str(commit.commit_url)


def uploaded(manifest: Manifest) -> list[str]:
    """The files that leave, as patterns that match no others."""
    return [re.sub(r"([*?[])", r"[\1]", name) for name in (*manifest.files, MANIFEST_FILE)]


def _passed_gate(directory: Path, force: bool) -> GateResult | None:
    try:
        gate = read_gate(directory)
    except ArtifactError as error:
        if force:
            return None
        raise HubError(f"{directory}: not evaluated; run: ffncompress eval {directory}, or pass --force") from error
    if gate.weights_sha256 != find_model(str(directory)).fingerprint() and not force:
        raise HubError(f"{directory}: its weights changed since the gate ran; run: ffncompress eval {directory}")
    if not gate.passed and not force:
        base, slimmed = gate.main.headline
        raise HubError(
            f"{directory}: the gate failed ({base:.2f} to {slimmed:.2f}, limit {gate.limit}); "
            "plan with a stricter --max-delta, or pass --force"
        )
    return gate


def _without_token(error: Exception, token: str | None) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0][:200] if lines else type(error).__name__
    for secret in (token, os.environ.get("HF_TOKEN")):
        if secret:
            text = text.replace(secret, "***")
    return text
