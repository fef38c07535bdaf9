"""The scripted engine, and an HTTP server in vLLM's shape for it or any other engine.

- `script`: the script's JSON form, the requests it matches, and the text of its turns.
- `tokenizer`: a tokenizer folder: text to ids and back, messages to prompts.
- `engine`: `ScriptedEngine`, which samples what its script says, and calls of a harness's own
  shell tool.
- `replies`: replies in vLLM's form, and the reader of their chat text.
- `server`: `EngineServer`, any engine over HTTP, with vLLM's routes for pauses, aborts and weights.
"""
