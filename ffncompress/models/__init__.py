"""Models: where they come from, and where their FFNs live."""

from ffncompress.models.families import (
    Block,
    Layout,
    count_parameters,
    find_blocks,
    in_out,
    install_,
    installed,
    oriented,
    out_projection,
    set_module,
    supported,
)
from ffncompress.models.loading import (
    EMBEDDED,
    ModelSource,
    context_of,
    find_model,
    load_config,
    load_model,
    load_random,
    load_tokenizer,
    quiet_bars,
)

__all__ = [
    "EMBEDDED",
    "Block",
    "Layout",
    "ModelSource",
    "context_of",
    "count_parameters",
    "find_blocks",
    "find_model",
    "in_out",
    "install_",
    "installed",
    "load_config",
    "load_model",
    "load_random",
    "load_tokenizer",
    "oriented",
    "out_projection",
    "quiet_bars",
    "set_module",
    "supported",
]
