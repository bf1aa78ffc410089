"""Models: where they come from, how they are loaded, and where their FFNs are.

Does not know what is done with them: no fit, no budget, no checkpoint.
A new family is a row in `families.py`.
"""

from ffncompress.models.base import find_base
from ffncompress.models.blocks import (
    Block,
    count_parameters,
    install_,
    installed,
    oriented,
    out_projection,
    set_module,
    width_key,
)
from ffncompress.models.families import Layout, supported
from ffncompress.models.finding import find_blocks, settled_parameters
from ffncompress.models.loading import (
    context_of,
    load_config,
    load_model,
    load_random,
    load_tokenizer,
    load_whole,
    quiet_bars,
)
from ffncompress.models.sources import EMBEDDED, ModelSource, find_model

__all__ = [
    "EMBEDDED",
    "Block",
    "Layout",
    "ModelSource",
    "context_of",
    "count_parameters",
    "find_base",
    "find_blocks",
    "find_model",
    "install_",
    "installed",
    "load_config",
    "load_model",
    "load_random",
    "load_tokenizer",
    "load_whole",
    "oriented",
    "out_projection",
    "quiet_bars",
    "set_module",
    "settled_parameters",
    "supported",
    "width_key",
]
