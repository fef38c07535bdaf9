"""Training on the embedded engine's models: the reference for what trajectories are good for.

`sft` trains on token-exact examples; `demo_model` makes the small model that demonstrations and
tests use.
"""
