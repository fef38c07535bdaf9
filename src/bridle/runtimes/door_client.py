"""The program behind a door's `bash`, `sh` and `container`: hands one command line over.

`python door_client.py SOCKET NAME [ARGUMENT...]`, started by scripts that a door writes. It gives
its own stdin, stdout and stderr away with the command, waits, and ends as the command did: with its
code, or by its signal. Whoever ends it ends the command. It runs where the harness runs, with the
standard library alone.
"""

import os
import signal
import socket
import sys
from typing import NoReturn

BROKEN = 125
"""Exit code where the command could not be run at all."""


def request(name: str, arguments: list[str]) -> bytes:
    """What is sent: the working folder, the number of words, the words, the environment."""
    words = [name, *arguments]
    variables = [f"{key}={value}" for key, value in os.environ.items()]
    text = "\0".join([os.getcwd(), str(len(words)), *words, *variables])  # noqa: PTH109 - no Path
    body = text.encode(errors="surrogateescape")
    return len(body).to_bytes(4, "big") + body


def ask(path: str, body: bytes) -> str:
    """Send a request with our three streams; the answer is one line."""
    folder, name = os.path.split(path)  # pathlib takes 10 ms to load
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as door:
        # Through the folder's number: a socket's own path may have no more than 107 bytes.
        door.connect(f"/proc/self/fd/{at}/{name}")
        os.close(at)
        socket.send_fds(door, [body[:1]], [0, 1, 2])
        door.sendall(body[1:])
        answer = b""
        while not answer.endswith(b"\n") and (more := door.recv(4096)):
            answer += more
    return answer.decode(errors="replace").strip()


def end_as(answer: str) -> NoReturn:
    """End like the command: `exit CODE`, `signal NUMBER`, or what went wrong."""
    kind, _, value = answer.partition(" ")
    if kind == "exit":
        sys.exit(int(value))
    if kind == "signal":
        number = int(value)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    print(f"bridle: {value or 'the sandbox did not answer'}", file=sys.stderr)  # noqa: T201 - to say
    sys.exit(BROKEN)


def main() -> None:
    """Hand the command over and end as it does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (0, 1, 2):  # a stream that is closed cannot be given away
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.argv[2] == "container" and sys.argv[3:4] != ["exec"]:
        print("sandbox")  # noqa: T201 - the id of the container that `run` made, for any verb
        return
    try:
        answer = ask(sys.argv[1], request(sys.argv[2], sys.argv[3:]))
    except OSError as error:
        answer = f"failed the sandbox's door is shut: {error}"
    end_as(answer)


if __name__ == "__main__":
    main()
