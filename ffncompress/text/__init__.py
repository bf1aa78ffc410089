"""Text: sources of it, disjoint parts, token windows; what is fitted on, chosen on and reported on.

Does not know models: it is handed a tokenizer. A new source is a reader in `sources.py`.
Public: `read`, `read_parts`, `Text`, `TextRef`, `Windows`, `gather_text`, `Corpus`.
"""
