"""Task sets: where tasks come from. `jsonl` reads files; `demo_tasks` and `lookups` make tasks."""
