"""The dashboard: look instead of read. Pages about runs, sessions, exchanges and tokens; read only.

Everything is rendered here, as HTML that works without JavaScript; htmx refreshes what is shown,
uPlot draws a training's curve. `app.make_app` is the way in: an ASGI application over a source,
which is a folder (`folder.Folder`: runs, trainings, data folders of gateways and servers) or a
rollout server (`served.ServerSource`).

What agents said and did is somebody else's text. It is escaped wherever it is shown, nothing is
loaded from elsewhere, and the pages' policy forbids scripts and styles that are not ours.
"""
