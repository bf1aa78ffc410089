"""Runtime: how a long computation runs: its processes, its progress, its stages on disk.

Does not know what is computed. `launch` and `progress` are light; the rest needs torch.
Public: `Run`, `Workers`, `Progress`, `step`, `Stages`, `StageKey`, `processes`, `Halving`, `shrinking`.
"""
