"""Records: what is written to a file and read back, perhaps from a stranger; unknown fields do not pass."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Record(BaseModel):
    """The base of them all: frozen, without unknown fields, and with infinities that survive JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


def first_fault(error: ValidationError) -> tuple[str, str]:
    """(where, what) of the first thing that is wrong with a record, in words for a message."""
    fault = error.errors()[0]
    return ".".join(map(str, fault["loc"])) or "its top", fault["msg"].removeprefix("Value error, ")
