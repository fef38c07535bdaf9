"""Training on what harnesses did: the reference for what trajectories are good for.

`grpo` is one update from groups of sessions: `samples` says how much each token counts, `forward`
computes its logprob (padded rows, or a tree in which each token stands once), `grpo` sums the
objective and steps. `loop` alternates rollouts and updates and draws the course: `groups` draws
tasks and runs ahead within bounds, in this process or on a server, and `checkpoint` keeps all of
it. `sft` trains on token-exact examples. `recompute` gives the trainer's logprobs of captured
tokens, to compare them with the rollout's. `settings` has the settings.

Small, readable and correct; no rival of the trainers that shard and pipeline.
"""
