"""The command line. A file holds related verbs, which parse flags, call the library and print.

- `__main__`: all verbs, errors, exit codes; `terminal`: shared flags, tables, JSON, checks of paths
- first steps: `init` (demo, init), `doctor` (doctor, certify), `harness`, `tasks`
- sessions: `run` (run, fork, batches of other verbs); `config`: the config file
- captured data: `show`, `score` (score, teach), `export` (rebuild, export, generate)
- servers: `gateway` (gateway, engine) and `serve` (serve, dashboard), in a `process` that ends by a
  signal; `client` (submit, status, watch, cancel)
- `train`

Exit codes, the same for every verb:

| code | meaning |
|---|---|
| 0 | done; for a batch: every session COMPLETED |
| 1 | done, but something did not succeed; the output says what |
| 2 | invalid input: a flag, a config value, a task file, a path, a port |
| 3 | an external failure: the engine, the disk, a missing program or package |
| 130 | ended by Ctrl-C, a batch or a training also by SIGTERM or SIGHUP; captured data are kept |
"""

import os
import sys


def main() -> None:
    """Run the command line; ends by `SystemExit`."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed, and the number is the next opened file's
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    try:
        from bridle.cli.__main__ import main as run
    except KeyboardInterrupt:  # while its packages are loaded
        sys.exit(130)

    run()
