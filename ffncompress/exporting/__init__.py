"""Exporting: a slimmed checkpoint as a file that other runtimes read, and the proof that they read it alike.

Does not know perplexity, nor how the plan was made.
Public: `export_model`, `ExportResult`.
"""
