"""Task sets: where tasks come from. `jsonl` reads files of tasks."""
