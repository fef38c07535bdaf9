"""The `local` runtime with a network of its own: what runs in it reaches the gateway only.

Test machinery: `RuntimeSpec(backend="tests.real_clients.alone:Alone")`. The files are the
machine's. `kwargs={"doors": [PORT]}` opens more ports of this machine.
"""

import sys
from pathlib import Path
from urllib.parse import urlsplit

from bridle.runtimes.local import LocalRuntime

BACKEND = f"{__name__}:Alone"
PROGRAM = Path(__file__).with_name("only_gateway.py")


class Alone(LocalRuntime):
    """Every process of the session starts behind `only_gateway`."""

    def __init__(self, spec, session_id, scratch, mounts=()):
        super().__init__(spec.model_copy(update={"kwargs": {}}), session_id, scratch, mounts)
        self.doors = {int(port) for port in spec.kwargs.get("doors", ())}

    def gateway_url(self, url):
        self.doors.add(urlsplit(url).port)
        return url

    async def exec(self, command, **options):
        plain = isinstance(command, str)
        argv = ("bash", "-o", "pipefail", "-c", command) if plain else tuple(command)
        doors = ",".join(map(str, sorted(self.doors)))
        return await super().exec(
            (sys.executable, "-I", "-S", str(PROGRAM), doors, *argv), **options
        )
