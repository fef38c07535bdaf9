"""The dashboard: read-only web pages about runs, sessions, exchanges and tokens.

Pages are rendered on the server and work without JavaScript; htmx refreshes them, uPlot draws
training curves.

- `app`: the ASGI application (`make_app`, the way in), its access control, and its templates with
  the values that they show as text
- `source`: the interface to the data of the pages, implemented by `folder` (run folders) and
  `server` (a rollout server)
- `summaries`: session rows, groups, totals and training curves
- `session`: one session in detail: conversation tree, exchanges, messages, the tokens of its traces

Text that agents wrote is untrusted. It is escaped wherever it is shown, nothing is loaded from
other hosts, and the pages' content security policy forbids scripts and styles of others.
"""
