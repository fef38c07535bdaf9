"""The rollout server: an HTTP API that accepts tasks, runs them and keeps what it accepted (law 6).

HTTP: `app` is the application and its listener, `http` handles requests and their tokens,
`routes_v1` has the routes, `polar` the routes and the tasks of Polar's clients, `settings` the
allow-list of task fields.

State: `schemas` has the tables, the states of their rows, and the bodies and queries of the API;
`migrations` makes the tables, `storage` has the database connections and the files of trajectories,
`store` the writes, `finalize` the ends of sessions and tasks, `queries` the reads and the JSON of
what they find.

Work: `service` is the entry: it accepts tasks, takes over from dead servers and removes old files.
`scheduler` starts sessions on a `bridle.node.base.SessionRunner`, and adds and removes its engines;
`callbacks` delivers results, `metrics` counts, `settings` configures.

A session is accepted when its task's row is committed. It ends exactly once: its trajectory is in a
file before its row is final, and only the run that holds its lease makes the row final.
"""
