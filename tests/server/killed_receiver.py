"""A receiver of callbacks that can be killed at any moment: it keeps a body, then answers.

python killed_receiver.py FOLDER PORT
"""

import asyncio
import json
import sys
from pathlib import Path

from aiohttp import web

KEPT = "callbacks.jsonl"


async def receive(folder, port):
    async def take(request):
        line = json.dumps(json.loads(await request.read()))
        with (folder / KEPT).open("a") as file:
            file.write(f"{line}\n")
        return web.Response()

    app = web.Application()
    app.router.add_post("/callbacks/session_result", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(receive(Path(sys.argv[1]), int(sys.argv[2])))
