"""What an emitted checkpoint says of itself: where it came from, how it fared, and whether it is still what it was.

All of it may come from a stranger: it is read as data of a known form, and believed as far as checksums go.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from ffncompress.errors import ArtifactError
from ffncompress.records.gate import GateResult
from ffncompress.records.origin import Origin
from ffncompress.records.plan import PLAN_FILE, Plan
from ffncompress.sanitize import parse_json
from ffncompress.schema import Record, first_fault
from ffncompress.storage.manifest import MANIFEST_FILE, Manifest

META = "ffncompress"
ORIGIN_FILE, RECIPE_FILE, GATE_FILE, CARD_FILE = "origin.json", "recipe.yaml", "gate.json", "README.md"
GATE_PAGE = "gate.html"
BEFORE_MANIFESTS = ("0.1.", "0.2.", "0.3.")  # releases whose checkpoints have none
R = TypeVar("R", bound=Record)


def read_origin(directory: str | Path) -> Origin:
    """What `apply` recorded of an emitted checkpoint.

    Raises:
        ArtifactError: the folder is not an emitted checkpoint.
    """
    if (Path(directory) / PLAN_FILE).is_file():
        raise ArtifactError(f"{directory}: a plan, not a checkpoint; first: ffncompress apply {directory} -o OUT")
    if not Path(directory).is_dir():
        raise ArtifactError(f"{directory}: no such folder; make one with: ffncompress apply PLAN -o {directory}")
    otherwise = "it was not made by ffncompress apply, or was saved again since"
    return _read(
        directory,
        ORIGIN_FILE,
        Origin,
        f"{otherwise}; any model is judged by: ffncompress eval {directory} --base MODEL",
    )


def read_gate(directory: str | Path) -> GateResult:
    """The gate's last result for an emitted checkpoint.

    Raises:
        ArtifactError: it was never evaluated, or what is there is not a result.
    """
    return _read(directory, GATE_FILE, GateResult, f"it was not evaluated; run: ffncompress eval {directory}")


def read_plan(directory: str | Path) -> Plan:
    """The plan that an emitted checkpoint was made from."""
    return Plan.load(Path(directory) / META)


def is_checkpoint(directory: str | Path) -> bool:
    """Whether a folder is a checkpoint that `apply` wrote."""
    return (Path(directory) / META / ORIGIN_FILE).is_file()


def verify_files(directory: str | Path) -> Manifest | None:
    """Compare every file of a checkpoint but its card with the checksums that were taken when it was written.

    Returns:
        The manifest; none for a checkpoint of a release that wrote none.

    Raises:
        ArtifactError: a file is missing, was changed, or came later.
    """
    origin = read_origin(directory)
    if not (Path(directory) / MANIFEST_FILE).exists() and origin.ffncompress_version.startswith(BEFORE_MANIFESTS):
        return None
    manifest = Manifest.read(directory)
    if manifest.kind != "checkpoint":
        raise ArtifactError(f"{directory}: its {MANIFEST_FILE} is that of a {manifest.kind}; emit the checkpoint again")
    changes = [change for change in manifest.changes(directory) if not change.startswith(f"{CARD_FILE} ")]
    if changes:
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        raise ArtifactError(
            f"{directory}: not as ffncompress wrote it: {changes[0]}{more}; "
            "emit it again with ffncompress apply, or get it again from where it came"
        )
    return manifest


def _read(directory: str | Path, name: str, kind: type[R], otherwise: str) -> R:
    file = Path(directory) / META / name
    if not file.is_file():
        raise ArtifactError(f"{directory}: there is no {META}/{name} in it: {otherwise}")
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        return kind.model_validate(content)
    except ValidationError as error:
        where, what = first_fault(error)
        raise ArtifactError(f"{file}: corrupted at {where} ({what}); make the folder again") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{file}: corrupted, not JSON; make the folder again") from error
