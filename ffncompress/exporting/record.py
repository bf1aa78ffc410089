"""What an export wrote, and what was measured of it."""

from __future__ import annotations

from typing import Literal

from ffncompress.schema import Record

Format = Literal["gguf", "hf", "onnx", "vllm"]


class Verification(Record):
    """A written file read by the runtime that it is for, beside transformers."""

    runtime: str  # its name and version; "none" where it is not installed
    tokens: int = 0  # positions that were compared
    max_difference: float | None = None  # of what is named below
    of: str = "log-probabilities"
    limit: float | None = None  # the export would have been refused above it; none: said and not judged
    same_tokens: int | None = None  # characters of a mixed page that both tokenizers split alike
    note: str = ""


class ExportResult(Record):
    """One export: the file or folder, its size, and whether its runtime agrees with transformers."""

    format: Format
    output: str
    architecture: str  # as the format calls it
    dtype: str
    bytes: int
    parameters: int  # weights in the file, with what folding and padding added
    base_parameters: int  # of the model that was exported
    widths: list[int]  # of each FFN as written
    verified: Verification

    @property
    def summary(self) -> str:
        """One or two lines for a person."""
        least, most = min(self.widths, default=0), max(self.widths, default=0)
        widths = f"FFN widths {least} to {most}" if least < most else f"FFN width {most}"
        lines = [
            f"{self.output}: {self.format}, {self.architecture}, {self.dtype}, {self.bytes:,} bytes, "
            f"{self.parameters:,} weights, {widths}"
        ]
        seen = self.verified
        if seen.max_difference is None:
            lines.append(f"not verified: {seen.note}")
        else:
            limit = (
                f" (limit {seen.limit:g})" if seen.limit else f" (the worst of them; {self.dtype} is told, not judged)"
            )
            limit = "" if seen.max_difference == 0 else limit
            alike = f"; a page of {seen.same_tokens:,} characters is tokenised alike" if seen.same_tokens else ""
            lines.append(
                f"compared with {seen.runtime}: {seen.of} of {seen.tokens:,} tokens differ by at most "
                f"{seen.max_difference:.1e}{limit}{alike}"
            )
            lines += [seen.note] if seen.note else []
        return "\n".join(lines)
