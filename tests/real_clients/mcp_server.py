"""A small MCP server of the standard library, over stdio or HTTP, with one tool: `stamp`.

`python mcp_server.py FILE [PORT_FILE]`: the tool appends its text to FILE. With PORT_FILE it serves
streamable HTTP on a free port of the loopback, which it writes there.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FILE = Path(sys.argv[1])
TOOL = {
    "name": "stamp",
    "description": "Put a stamp on a file.",
    "inputSchema": {
        "type": "object",
        "properties": {"text": {"type": "string", "description": "What to stamp."}},
        "required": ["text"],
    },
}


def answer(message):
    """The reply to one message of the client; `None` = it needs none."""
    method, params = message.get("method"), message.get("params") or {}
    if "id" not in message:
        return None
    reply = {"jsonrpc": "2.0", "id": message["id"]}
    if method == "initialize":
        server = {"name": "stamps", "version": "1.0"}
        version = params.get("protocolVersion", "2025-06-18")
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    elif method == "tools/list":
        result = {"tools": [TOOL]}
    elif method == "tools/call":
        with FILE.open("a") as file:
            file.write(params["arguments"]["text"] + "\n")
        result = {"content": [{"type": "text", "text": "stamped"}]}
    elif method == "ping":
        result = {}
    else:
        return {**reply, "error": {"code": -32601, "message": f"no method {method}"}}
    return {**reply, "result": result}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = answer(message)
        body = b"" if reply is None else json.dumps(reply).encode()
        self.send_response(202 if reply is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send_response(405)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_DELETE = do_GET  # noqa: N815 - the base class's name

    def log_message(self, *_):
        """Say nothing."""


def main():
    if len(sys.argv) > 2:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Path(sys.argv[2]).write_text(str(server.server_address[1]))
        server.serve_forever()
    for line in sys.stdin:
        if (reply := answer(json.loads(line))) is not None:
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
