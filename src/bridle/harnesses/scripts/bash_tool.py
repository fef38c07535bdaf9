"""The one tool of the agents that Bridle ships as scripts on a provider's SDK: a shell.

Runs inside the sandbox, with the bundle's Python; it knows nothing of Bridle.
"""

import os
import signal
import subprocess

LIMIT_S = 120
LONGEST = 30_000
"""Characters of output that the model gets; of more, the middle is left out."""


def bash(command: str) -> str:
    """Run a shell command in the work folder and return what it printed.

    Args:
        command: The command line, read by bash.
    """
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        ending = f"exit code: {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        ending = f"stopped after {LIMIT_S} s"
    text = output.decode(errors="replace")
    if len(text) > LONGEST:
        left_out = len(text) - LONGEST
        half = LONGEST // 2
        text = f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
    return f"{text.rstrip()}\n[{ending}]".lstrip()
