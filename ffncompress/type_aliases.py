"""Names for what other libraries leave untyped: a signature then says what is meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Model: TypeAlias = Any  # a transformers PreTrainedModel: torch types its attributes as "Tensor or Module"
Tokenizer: TypeAlias = Any  # a transformers tokenizer
Config: TypeAlias = Any  # a transformers PretrainedConfig
LayerOutput: TypeAlias = Any  # of a decoder layer: the hidden state, or a tuple that begins with it
Hook: TypeAlias = Callable[..., Any]  # a forward hook of torch
DeviceMap: TypeAlias = Any  # what accelerate takes for one: a word, or a mapping of modules to devices
LoadingInfo: TypeAlias = Any  # what transformers counts at the end of loading
TypeForm: TypeAlias = Any  # what pydantic takes for a type: a class, a union, a list of them
Json: TypeAlias = Any  # parsed, and not looked at yet
Frame: TypeAlias = Any  # a pandas DataFrame: pandas is imported where one is asked for
