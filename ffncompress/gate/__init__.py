"""Gate: lm-eval's perplexity of the base and the slimmed model, a limit, and a verdict.

Does not know how a plan is made.
Public: `run_gate`, `lm_eval_perplexity`.
"""
