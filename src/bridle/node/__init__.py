"""The node: sessions from task to result, on one machine or on a cluster.

One session: `session` is its state machine with all stages, `ending` decides how it ended (law 5),
`workspace` prepares its runtime and keeps its artifacts, `places` gives its evaluator runtimes.
`results` is its outcome, `events` reports its progress, `run_folder` has its files.

Many sessions: `base` has the contracts (`Node`, `SessionRunner`, `RemoteNode`), `local` the node in
this process, and `batch` runs the sessions of many tasks on it. On a cluster, `host` serves a node
to owners in other processes, `ray` starts one on each machine and has the proxy, `scheduling`
chooses a node, `fleet` steers all nodes at once, and `cluster` runs sessions on them.
"""
