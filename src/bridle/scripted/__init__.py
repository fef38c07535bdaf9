"""The scripted engine, and an HTTP server in vLLM's shape for it or any other engine.

- `script`: the script's JSON form, and the turn that a request gets.
- `shell`: finds a harness's shell tool and fills its arguments.
- `tokenizer`: a tokenizer folder as an engine needs it.
- `chatml`: turns and prompts of the ChatML family, spelled and read back.
- `engine`: `ScriptedEngine`, which samples what its script says.
- `answers`: replies in vLLM's shapes.
- `control`: vLLM's routes for pauses, aborts and weights.
- `server`: `EngineServer`, any engine over HTTP.
"""
