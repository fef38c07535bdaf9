"""The node: sessions from task to result, on one machine or on a cluster.

One session: `session` is its state machine with all stages, `workspace` prepares its runtime, keeps
its artifacts and gives its evaluator runtimes. `results` is its outcome, how it ended (law 5), and
the folder of a run, where captured sessions are found again.

Many sessions: `base` has the contracts (`Node`, `SessionRunner`, `RemoteNode`) and the events that
report progress, `local` the node in this process, which runs the sessions of many tasks. On a
cluster, `host` serves a node to owners in other processes, `ray` starts one on each machine and has
the proxy, `fleet` chooses a node and steers all of them at once, and `cluster` runs sessions on
them.
"""
