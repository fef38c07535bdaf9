"""The model API that harnesses call: every model call passes here, is captured, and is answered.

One request goes through these files in order:

- `routing`   whose session a path and a key name, and which dialect the rest of the path speaks;
- `plain`     a linear turn, in two callbacks (`plain_live`: its stream, where it leaves while it is
  sampled); any other request takes the general path below;
- `exchange`  place it, prompt the engine, sample, commit: the states of one `call`;
- `retries`   clients of a call and the record of what they received;
- `relay`     the reply on the wire, streaming or not, with keep-alives;
- `registry`  sessions with their keys, limits, facts and tries; `restore` brings them back;
- `control`   the routes for those who run sessions, with a token of their own.

With `--workers N`, `workers` supervises N processes that are each a whole gateway with a port of
its own, and answers the control routes for all of them.

The one entry is `bridle.gateway.app.GatewayServer`. Everything runs on one event loop, so there are
no locks: between two awaits nobody else acts.
"""
