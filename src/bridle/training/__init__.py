"""Training on what harnesses did: the reference for what trajectories are good for.

`grpo` is one update from groups of sessions: `samples` says how much each token counts, `forward`
computes its logprob (padded rows, or a tree in which each token stands once), also of captured
tokens, to compare it with the rollout's, `grpo` sums the objective and steps. `loop` alternates
rollouts and updates, keeps checkpoints, and draws the course: `groups` draws tasks and runs ahead
within bounds, in this process or on a server. `sft` trains on token-exact examples. `settings` has
the settings.

Small, readable and correct; no rival of the trainers that shard and pipeline.
"""
