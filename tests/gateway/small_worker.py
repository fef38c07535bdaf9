"""A worker that is no gateway: it speaks to its supervisor like one and answers with its name.

A program of the standard library alone, so that a test can start a few of them. Its line of JSON
may tell, by worker: an `error` that keeps it from starting, a key to `refuse` in bodies (once the
named pipe `refuses_after` was read, if it has one), and a file that, while it is there, keeps every
second start from coming up (`stumbles`).
"""

import json
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SPEC = json.loads(sys.stdin.readline())
NAME = Path(SPEC["gateway"]["data_dir"]).name
OWN = SPEC.get(NAME, {})
TOKEN = f"Bearer {SPEC['gateway']['control_token']}"
POLICY = {"version": 0, "paused": False, "hold": None, "model": "small", **SPEC["policy"]}
POLICY.setdefault("weights", None)
REPLICAS = ["http://first", *(name for change, name in SPEC["replicas"] if change == "add")]
SESSIONS: dict[str, str] = {}


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self):
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size).decode()
        status, answer = self.route(body)
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the names that http.server calls

    def route(self, body):  # noqa: PLR0911, C901 - one per route
        asked = json.loads(body) if body.startswith("{") else {}
        if OWN.get("refuse") in asked:
            if "refuses_after" in OWN:
                Path(OWN["refuses_after"]).write_bytes(b"")
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
                session_id = asked.get("session_id")
                if not isinstance(session_id, str):
                    return 400, {"error": {"message": "session_id is missing"}}
                if OWN.get("dies") == session_id:
                    os._exit(1)
                SESSIONS[session_id] = f"bk-{session_id}-key"
                return 200, {"session_id": session_id, "worker": NAME}
            case "GET", "/sessions":
                return 200, {"sessions": [{"session_id": one} for one in SESSIONS]}
            case (("POST" | "DELETE"), _) if self.path.startswith("/replicas"):
                adds, name = self.command == "POST", asked.get("engine", "http://second")
                if adds == (name in REPLICAS):
                    return 400, {"error": {"message": f"{NAME} has {REPLICAS}"}}
                (REPLICAS.append if adds else REPLICAS.remove)(name)
        if self.path.startswith("/replicas"):
            zeros: dict = dict.fromkeys(
                ("calls_in_flight", "sessions", "calls", "failures", "losses", "version"), 0
            )
            zeros |= {"prompt_tokens": 1, "cached_tokens": 0, "state": "live"}
            return 200, {"replicas": [{"name": name, **zeros} for name in REPLICAS]}
        allowed = self.headers.get("Authorization") == TOKEN
        return 200, {"worker": NAME, "method": self.command, "path": self.path, "token": allowed}


def say(answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main():
    if "stumbles" in OWN:
        mark = Path(OWN["stumbles"])
        if mark.exists():
            mark.unlink()
            sys.exit(1)
        mark.touch()
    if "error" in OWN:
        say({"error": OWN["error"], "kind": OWN.get("kind", "")})
        sys.exit(1)
    for number in sys.argv[1:]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answers, bind_and_activate=False)
        server.socket.close()
        server.socket = socket.socket(fileno=int(number))
        server.socket.setblocking(True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    say({"ready": True})
    sys.stdin.read()
    os._exit(0)


main()
