"""Pages to look at: what a plan and a gate found, each one file that asks nothing of a network.

Public: `render_page`, `Words` (any page), `render_plan` (plan.html), `render_gate` (gate.html).
"""
