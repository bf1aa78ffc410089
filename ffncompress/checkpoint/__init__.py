"""Checkpoint: the emitted folder, how transformers loads it, whether it is whole, and its card.

Does not know perplexity, nor how the plan was made.
Public: `save_compressed`, `load`, `verify`, `apply_`, `patched`, `read_origin`, `verify_files`, `write_card`.
"""
