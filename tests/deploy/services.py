"""The services of `deploy/compose.yaml`, run by `docker run` as `docker compose up` would run them.

Debian and PyPI have Compose 1.29 only, which refuses the file: it knows neither a `name` at its top
nor `systempaths`. What a service says that is not read here is an error.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.deploy.images import docker

READ = {
    *("image", "build", "restart", "shm_size", "environment", "command", "ports", "volumes"),
    *("depends_on", "healthcheck", "security_opt", "profiles"),
}


@contextmanager
def running(
    services: Mapping[str, Any], project: str, env: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Start the services in the order that they need; service -> container's name."""
    names = {name: f"{project}-{name}" for name in services}
    with ExitStack() as stack:
        docker("network", "create", project)
        stack.callback(docker, "network", "rm", project)
        volumes = {
            one.split(":")[0] for each in services.values() for one in each.get("volumes", ())
        }
        for volume in volumes:
            if not volume.startswith("/"):
                stack.callback(docker, "volume", "rm", f"{project}-{volume}")
        for name in _in_order(services):
            service = services[name]
            assert service.keys() <= READ, name
            for other, how in service.get("depends_on", {}).items():
                if how["condition"] == "service_healthy":
                    _healthy(names[other])
            words = ["--name", names[name], "--network", project, "--network-alias", name]
            stack.callback(docker, "rm", "-f", "-v", names[name])
            docker("run", "-d", *words, *_options(service, project, env))
        try:
            yield names
        except BaseException as error:
            error.add_note("\n".join(_said(name) for name in names.values()))
            raise


def _said(container: str) -> str:
    words = ["docker", "logs", "--tail", "20", container]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    return f"{container}:\n{done.stdout}{done.stderr}"


def _in_order(services: Mapping[str, Any]) -> list[str]:
    done: list[str] = []
    while len(done) < len(services):
        ready = (
            n
            for n, s in services.items()
            if n not in done and {*s.get("depends_on", ())} <= {*done}
        )
        done.append(next(ready))
    return done


def _options(service: Mapping[str, Any], project: str, env: Mapping[str, str]) -> Iterator[str]:
    yield f"--restart={service['restart']}"
    if "shm_size" in service:
        yield f"--shm-size={service['shm_size']}"
    for name, value in service.get("environment", {}).items():
        yield f"--env={name}={_filled(value, env)}"
    for port in service.get("ports", ()):
        yield f"--publish={port}"
    for volume in service.get("volumes", ()):
        yield f"--volume={volume}" if volume.startswith("/") else f"--volume={project}-{volume}"
    for option in service.get("security_opt", ()):
        yield f"--security-opt={option}"
    check = service.get("healthcheck")
    if check:
        kind, command = check["test"]
        assert kind == "CMD-SHELL"
        yield f"--health-cmd={command}"
        for name in ("interval", "timeout", "retries"):
            yield f"--health-{name}={check[name]}"
    yield service["image"]
    yield from service.get("command", ())


def _filled(value: str, env: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)(?::\?|:-[^}]*)?\}", lambda found: env[found[1]], value)


def _healthy(name: str) -> None:
    until = time.monotonic() + 90
    while (state := json.loads(docker("inspect", name))[0]["State"])["Health"][
        "Status"
    ] != "healthy":
        assert time.monotonic() < until, (state, docker("logs", name))
        time.sleep(0.5)
