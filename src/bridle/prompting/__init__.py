"""Messages in, exact prompt ids out.

`canonical` turns a request into a chain of hashed atoms; `conversation` finds by that chain which
exchange a request continues (both pure; their specification is the project's matching document).
`prompt` holds prompt ids so that no earlier id is ever parsed or copied again. `renderer` turns
messages into ids, extends a parent's exact ids by new messages only, and parses what was sampled.

Entries: `canonical.canonical`, `conversation.Conversation`, `prompt.PromptIds`,
`renderer.load_renderer`.
"""
