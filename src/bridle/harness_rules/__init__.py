"""Facts about harnesses that the gateway and the adapters share: one row per harness in `table`.

`base` defines a row and its rules, and compares a prompt with its capture. `table` has the rows and
classifies a call as agent, sub-agent, compaction or side call. The adapter, which installs and
starts the program, is in `bridle.harnesses`. Adding a harness is its adapter and its row.
"""
