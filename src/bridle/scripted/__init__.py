"""The scripted engine, and an HTTP server in vLLM's shape for it or any other engine.

- `script`: the script's JSON form, and the turn that a request gets.
- `tokenizer`: a tokenizer folder as an engine needs it.
- `chatml`: turns and prompts of the ChatML family, spelled and read back.
- `engine`: `ScriptedEngine`, which samples what its script says, and calls of a harness's own
  shell tool.
- `answers`: replies in vLLM's shapes.
- `server`: `EngineServer`, any engine over HTTP, with vLLM's routes for pauses, aborts and weights.
"""
