"""A sandbox service as small as can be, for trying `hosted.py`: it runs commands on its machine.

    python service.py PORT TOKEN

It listens on loopback. Its sandboxes contain nothing: each is a name and no more.
"""

import asyncio
import secrets
import sys
from pathlib import Path

from aiohttp import web

MOST_BYTES = 1 << 30
SANDBOXES: set[str] = set()


@web.middleware
async def guard(request: web.Request, handler):  # type: ignore[no-untyped-def]
    """Refuse who has not the token, and sandboxes that are not there."""
    if request.headers.get("Authorization") != f"Bearer {request.app['token']}":
        raise web.HTTPUnauthorized
    name = request.match_info.get("id")
    if name is not None and name not in SANDBOXES:
        raise web.HTTPNotFound
    return await handler(request)


async def create(_: web.Request) -> web.Response:
    """Make a sandbox."""
    SANDBOXES.add(name := secrets.token_hex(8))
    return web.json_response({"id": name})


async def execute(request: web.Request) -> web.Response:
    """Run a command and answer when it has ended."""
    pipe = asyncio.subprocess.PIPE
    argv = (await request.json())["argv"]
    process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    said = {"stdout": out.decode(errors="replace"), "stderr": err.decode(errors="replace")}
    return web.json_response({"exit_code": process.returncode, **said})


async def put_file(request: web.Request) -> web.Response:
    """Write a file."""
    await asyncio.to_thread(Path(request.query["path"]).write_bytes, await request.read())
    return web.json_response({})


async def delete(request: web.Request) -> web.Response:
    """Give a sandbox back."""
    SANDBOXES.remove(request.match_info["id"])
    return web.json_response({})


def main() -> None:
    """Serve until SIGTERM."""
    app = web.Application(middlewares=[guard], client_max_size=MOST_BYTES)
    app["token"] = sys.argv[2]
    app.router.add_post("/sandboxes", create)
    app.router.add_post("/sandboxes/{id}/exec", execute)
    app.router.add_put("/sandboxes/{id}/files", put_file)
    app.router.add_delete("/sandboxes/{id}", delete)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
