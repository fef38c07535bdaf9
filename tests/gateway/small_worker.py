"""A worker that is no gateway: it speaks to its parent as one does, and answers with its name.

A program of the standard library alone, so that a test can start a few of them. What it reads
tells its `name`, an `error` that keeps it from starting, a word to `refuse` in bodies, and a file
that, while it is there, keeps every second start from coming up (`stumbles`).
"""

import json
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOLD = json.load(sys.stdin)
NAME = TOLD["name"]
POLICY = {"version": 0, "paused": False, "hold": None, "model": "small"}
REPLICAS = ["http://first"]
SESSIONS: dict[str, str] = {}


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self):
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size).decode()
        status, told = self.told(body)
        data = told.encode() if isinstance(told, str) else json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the names that http.server calls

    def told(self, body):  # noqa: PLR0911 - one per route
        asked = json.loads(body) if body.startswith("{") else {}
        if TOLD.get("refuse") in asked:
            return 400, {"error": {"message": f"{NAME} refuses"}}
        match self.command, self.path:
            case "GET", "/metrics":
                return (
                    200,
                    f"# HELP n_total Calls.\n# TYPE n_total counter\nn_total {len(SESSIONS)}\n",
                )
            case "POST", "/policy":
                POLICY.update({key: value for key, value in asked.items() if key in POLICY})
                POLICY["hold"] = POLICY["hold"] or None
                return 200, POLICY
            case "GET", "/policy":
                return 200, POLICY
            case "POST", "/sessions":
                session_id = asked.get("session_id") or f"s-{NAME}-{len(SESSIONS)}"
                SESSIONS[session_id] = f"bk-{session_id}-key"
                return 200, {"session_id": session_id, "key": SESSIONS[session_id]}
            case "GET", "/sessions":
                return 200, {"sessions": [{"session_id": one} for one in SESSIONS]}
            case "POST", "/replicas":
                REPLICAS.append(asked["engine"])
        if self.path == "/replicas":
            zeros: dict = dict.fromkeys(
                ("calls_in_flight", "sessions", "calls", "failures", "losses", "version"), 0
            )
            zeros |= {"prompt_tokens": 1, "cached_tokens": 0, "state": "live"}
            return 200, {"replicas": [{"name": name, **zeros} for name in REPLICAS]}
        return 200, {"worker": NAME, "method": self.command, "path": self.path, "body": body}


def say(told):
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def main():
    if "stumbles" in TOLD:
        mark = Path(TOLD["stumbles"])
        if mark.exists():
            mark.unlink()
            sys.exit(1)
        mark.touch()
    if "error" in TOLD:
        say({"error": TOLD["error"], "kind": TOLD.get("kind", "")})
        sys.exit(1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say({"url": f"http://127.0.0.1:{server.server_port}"})
    channel = socket.socket(fileno=int(sys.argv[1]))
    while True:
        told, numbers, _, _ = socket.recv_fds(channel, 1, 4)
        if not told:
            os._exit(0)
        channel.send(b"t")
        for number in numbers:
            server.process_request(socket.socket(fileno=number), ("", 0))


main()
