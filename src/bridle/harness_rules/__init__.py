"""Facts about harnesses that the gateway and the adapters share: one row per harness in `table`.

`base` defines a row and its rules. `kinds` classifies a call as agent, sub-agent, compaction or
side call; `noise` compares a prompt with its capture. The adapter, which installs and starts the
program, is in `bridle.harnesses`. Adding a harness is its adapter and its row.
"""
