"""CPU seconds of commands that are asked often: `python -m benchmarks.startup RUN`, a run folder.

The least of 20 starts each, user and system time; other work on the machine makes each one dearer.
"""

import os
import sys

STARTS = 20


def cpu_s(arguments: list[str]) -> float:
    """CPU seconds of one start of this Python with these arguments."""
    silent = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
    started = os.posix_spawn(
        sys.executable, [sys.executable, *arguments], os.environ, file_actions=silent
    )
    _, status, used = os.wait4(started, 0)
    if status:
        sys.exit(f"{arguments} ended with status {status}")
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print a line for each command."""
    bridle = ["-m", "bridle.cli"]
    commands = {
        "python -c pass": ["-c", "pass"],
        "import bridle": ["-c", "import bridle"],
        "bridle --help": [*bridle, "--help"],
        "bridle show RUN": [*bridle, "show", sys.argv[1]],
    }
    for name, arguments in commands.items():
        best = min(cpu_s(arguments) for _ in range(STARTS))
        sys.stdout.write(f"{name:16} {best:.3f} s\n")


if __name__ == "__main__":
    main()
