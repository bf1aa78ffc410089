"""Records: the files that users hold, as typed data: plan.json, gate.json, origin.json, and how old ones are read.

Does not know how any of it was found, nor how it is used.
Public: `Plan`, `BlockPlan`, `Option`, `Shape`, `GateResult`, `Origin`, `Tolerance`, `load_tensors`, `migrated`.
"""
