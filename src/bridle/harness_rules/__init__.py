"""Facts about harnesses that the gateway and the adapters share: one row per harness in `table`.

`table` classifies a call as agent, sub-agent, compaction or side call, too. The adapter, which
installs and starts the program, is in `bridle.harnesses`. Adding a harness is its adapter and its
row.
"""
