"""Everything that can be checked before an engine is asked or a sandbox is made."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bridle import telemetry
from bridle.cli.agents import SYSTEM
from bridle.cli.paths import check_folder
from bridle.config import Task
from bridle.errors import ConfigError, EngineError, Problems, StoreError, cannot_listen
from bridle.folders import check_room
from bridle.lifecycle.manager import check
from bridle.lifecycle.opening import read_replay
from bridle.lifecycle.run_folder import CAPTURE, RUN, TRAJECTORIES
from bridle.runtimes import chosen
from bridle.runtimes.local import PATH

if TYPE_CHECKING:
    from bridle.api import Gateway
    from bridle.cli.config import FileConfig

CONNECT_S = 2.0
"""Time for a connection to an engine, which is then closed."""

INTERPRETERS = frozenset({"python", "python3", "node", "uv", "npx", "conda"})


def preflight(problems: Problems, tasks: Sequence[Task], gateway: Gateway | None) -> None:
    """Note what would keep `tasks` from running on `gateway`; starts and asks nothing."""
    faults: defaultdict[str, list[str]] = defaultdict(list)
    for task in tasks:
        own = Problems()
        with own.noting():
            check([task])
            _check_program(task)
            if task.fork is not None:
                read_replay(task.fork, Path(task.task_dir or "."))
        for error in own.found:
            name = f"task {task.task_id!r}"
            faults[str(error).removeprefix(f"{name}: ")].append(name)
    for fault, names in faults.items():
        also = f" and {len(names) - 1} more" if len(names) > 1 else ""
        problems.found.append(ConfigError(f"{names[0]}{also}: {fault}"))
    if gateway is None:
        return
    with problems.noting():
        _check_run_folder(gateway.path)
    with problems.noting():
        gateway.prepare()
    with problems.noting():
        telemetry.check(gateway.config.telemetry)
    with problems.noting():
        _check_port(gateway.config)
    with problems.noting():
        _check_engines(gateway.config.engines)


def _check_program(task: Task) -> None:
    """Refuse a command whose program lies where a bubblewrap sandbox shows nothing."""
    spec, command = chosen(task.runtime), task.agent.command
    if not command or spec.backend != "bubblewrap" or spec.image or spec.prepare:
        return
    try:
        program = shlex.split(command)[0]
    except (ValueError, IndexError):
        return
    fix = "`bridle init --agent` finds what it needs; or name it in runtime.kwargs.binds"
    if program in INTERPRETERS and shutil.which(program, path=PATH) is None:
        raise ConfigError(f"agent.command: the sandbox has no {program!r}; {fix}")
    shown = (*map(str, SYSTEM), *spec.kwargs.get("binds", ()))
    path = Path(program)
    if path.is_absolute() and path.exists() and not any(path.is_relative_to(s) for s in shown):
        raise ConfigError(f"agent.command: the sandbox does not show {program}; {fix}")


def _check_run_folder(folder: Path) -> None:
    if any((folder / name).exists() for name in (RUN, CAPTURE, TRAJECTORIES)):
        raise ConfigError(f"{folder} holds a run already; give another folder")
    check_folder(folder, "--out")
    existing = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    try:
        check_room(existing)
    except OSError as error:
        raise StoreError(f"{existing}: {error.strerror or error}; free some disk space") from error


def _check_port(config: FileConfig) -> None:
    host, port = config.gateway.host, config.gateway.port
    try:
        with closing(socket.create_server((host, port))):
            pass
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def _check_engines(specs: Sequence[str]) -> None:
    """Refuse servers of which not one takes a connection."""
    faults = []
    for spec in specs:
        found = re.search(r"https?://[^#]+", spec)
        url = urlsplit(found[0]) if found else None
        if url is None or not url.hostname:
            return
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            socket.create_connection((url.hostname, port), timeout=CONNECT_S).close()
        except OSError as error:
            faults.append(f"engine {spec} takes no connection: {error.strerror or error}")
        else:
            return
    raise EngineError("; ".join(faults) + "; start it, or name another with --engine")
