"""A Ray cluster of several machines on this one, and a server on it that can be killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.ports import free_port

from bridle.capture.sqlite import SqliteReader
from bridle.folders import FolderLock

ROOT = Path(__file__).resolve().parents[2]

STORE_BYTES = 80 << 20
"""Of each machine's object store; Ray takes no less than 75 MB."""

GOING_S = 60.0
"""How long what ran on machines that were ended may take to be gone."""


class Machines:
    """A head that computes nothing, and machines that do. Use `machines`."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        from bridle.node.ray import HEALTH

        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH}
        self._cluster = Cluster(
            initialize_head=True,
            connect=False,
            head_node_args={**head, "object_store_memory": STORE_BYTES},
        )
        self.address: str = self._cluster.address
        self.names: list[Any] = []

    def add(self, **offers: float) -> Any:
        """A machine joins."""
        resources = {"bridle_node": 1.0, **offers}
        one = self._cluster.add_node(
            num_cpus=1, resources=resources, object_store_memory=STORE_BYTES
        )
        self.names.append(one)
        return one

    def kill(self, one: Any) -> None:
        """Kill a machine with all its processes; none of them can handle the signal."""
        self.names.remove(one)
        [raylet] = [process.process.pid for process in one.all_processes["raylet"]]
        doomed = [raylet, *_children(raylet)]
        for pid in doomed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(one, allow_graceful=False)

    def actors(self) -> list[int]:
        """The processes of all node actors."""
        raylets = [one.all_processes["raylet"][0].process.pid for one in self.names]
        return [pid for one in raylets for pid in _children(one) if "NodeActor" in _title(pid)]

    def end(self) -> None:
        """End them all."""
        self._cluster.shutdown()


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in listed for child in _read(path).split()]


def _title(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it ended while we looked
        return ""


@contextmanager
def machines(count: int, data: Path) -> Iterator[Machines]:
    """`count` machines whose nodes have their folders in `data`; nothing is left when it is left.

    Runs inherit this process's environment.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    all_of_them = Machines()
    try:
        for _ in range(count):
            all_of_them.add()
        yield all_of_them
    finally:
        all_of_them.end()
        nobody_holds(data)


def nobody_holds(data: Path) -> None:
    """Wait until no node's process has its folder any more."""
    for folder in data.glob("*/*"):
        FolderLock(folder, patience_s=GOING_S).close()


class Served:
    """A server in a process of its own, the same one after each kill."""

    def __init__(self, config: Path, address: str) -> None:
        self.config = config
        self.url = re.sub(r"\D*(\d+)", r"http://127.0.0.1:\1", f"{_port(config)}")
        self._environment = os.environ | {"RAY_ADDRESS": address}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; whoever needs it waits until it answers."""
        command = [sys.executable, "-m", "bridle.cli", "serve", "--config", str(self.config)]
        with (self.config.parent / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stderr=log, env=self._environment)

    def kill(self) -> None:
        """`kill -9`."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Ask it to end; its exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(60)
        self._process = None
        return code

    @contextmanager
    def up(self) -> Iterator[Served]:
        """Run it inside; it ends by itself when it is asked to."""
        self.start()
        code = 0
        try:
            yield self
        finally:
            if self._process is not None:
                code = self.stop()
        assert code == 0


def _port(config: Path) -> int:
    found = re.search(r"^port = (\d+)$", config.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


TELLER = """
import sys, ray
ray.init(sys.argv[1], namespace=sys.argv[2], log_to_driver=False)
engines = sys.argv[3:]
class Teller:
    def __init__(self, engines):
        self.listed = engines
    def engines(self):
        return self.listed
teller = ray.remote(Teller).options(name="engines", lifetime="detached", num_cpus=0)
ray.get(teller.remote(engines).engines.remote())
"""


def tell_of(address: str, *engines: str) -> None:
    """Have an actor `engines` in the namespace `trainer` tell of these."""
    words = [sys.executable, "-c", TELLER, address, "trainer", *engines]
    subprocess.run(words, check=True, timeout=120, stderr=subprocess.DEVNULL)


@contextmanager
def an_engine(script: Path) -> Iterator[str]:
    """A scripted engine in a process of its own; gives its URL."""
    port = free_port()
    words = [
        sys.executable,
        "-m",
        "bridle.cli",
        "engine",
        f"scripted:{script}",
        "--port",
        f"{port}",
    ]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def config_in(folder: Path, *, kind: str = "ray", slots: int = 4) -> Path:
    """A config with a scripted engine; one line of it says where sessions are computed."""
    script = folder / "script.json"
    script.write_text(json.dumps({"conversations": [{"turns": [{"content": "It is done."}]}]}))
    path = folder / f"{kind}.toml"
    path.write_text(
        f'engines = ["scripted:{script}"]\n'
        f'[server]\nport = {free_port()}\ndata = "{folder}/{kind}"\n'
        f"[executor.node]\nrun_slots = {slots}\nready_buffer = 2\npost_slots = 1\n"
        f'[executor]\nkind = "{kind}"\n'
        '[executor.ray]\nengines_from = "trainer/engines"\nengines_s = 1\n'
    )
    return path


def runs_in(data: Path) -> dict[str, str]:
    """Run id -> how it ended, of all runs that any node has in its capture."""
    found: dict[str, str] = {}
    for path in sorted(data.glob("*/*/capture.sqlite")):
        with SqliteReader(path) as capture:
            for session in capture.sessions():
                outcome = capture.outcome(session.session_id)
                found[session.session_id] = "none" if outcome is None else outcome.status
    return found
