"""Models: where they come from, how they are loaded, and where their FFNs are.

Does not know what is done with them: no fit, no budget, no checkpoint.
A new family is a row in `families.py`.
"""

from ffncompress.models.base import find_base
from ffncompress.models.blocks import (
    Block,
    count_parameters,
    ffn_of,
    inner_matrices,
    install_,
    installed,
    oriented,
    out_projection,
    width_key,
)
from ffncompress.models.families import Layout, supported
from ffncompress.models.finding import Ffns, find_blocks, find_ffns, settled_parameters
from ffncompress.models.footprint import Footprint
from ffncompress.models.forward import forward, on_rows, standing_in
from ffncompress.models.layer_run import first_tensor
from ffncompress.models.loading import (
    DEFAULT_CONTEXT,
    context_of,
    embedding_rows,
    load_config,
    load_model,
    load_random,
    load_tokenizer,
    load_whole,
    longest_of,
    quiet_bars,
)
from ffncompress.models.sources import EMBEDDED, ModelSource, find_model
from ffncompress.models.streaming import is_streamed, shelved
from ffncompress.models.tasks import task_of

__all__ = [
    "DEFAULT_CONTEXT",
    "EMBEDDED",
    "Block",
    "Ffns",
    "Footprint",
    "Layout",
    "ModelSource",
    "context_of",
    "count_parameters",
    "embedding_rows",
    "ffn_of",
    "find_base",
    "find_blocks",
    "find_ffns",
    "find_model",
    "first_tensor",
    "forward",
    "inner_matrices",
    "install_",
    "installed",
    "is_streamed",
    "load_config",
    "load_model",
    "load_random",
    "load_tokenizer",
    "load_whole",
    "longest_of",
    "on_rows",
    "oriented",
    "out_projection",
    "quiet_bars",
    "settled_parameters",
    "shelved",
    "standing_in",
    "supported",
    "task_of",
    "width_key",
]
