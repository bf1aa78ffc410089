"""Storage: files and folders put in place whole, what is ours, one run at a time, what a killed run left.

Does not know what the files mean: no model, no plan, no text.
Public: `write_file`, `staged_directory`, `claimed`, `Manifest`, `locked`, `working_folder`, `spool`, `recorded_place`.
"""
