"""The command line: one thin file per verb, which parses, calls the library and prints.

Exit codes, the same for every verb:

| code | meaning |
|---|---|
| 0 | done; for a batch: every session COMPLETED |
| 1 | done, but something did not succeed; the output says what |
| 2 | what was given is wrong: a flag, a config value, a task file, a path, a port |
| 3 | something outside failed: the engine, the disk, a missing program or package |
| 130 | ended by Ctrl-C; what was captured is kept |
"""


def main() -> None:
    """Run the command line; ends by `SystemExit`."""
    from bridle.cli.app import main as run

    run()
