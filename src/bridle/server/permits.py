"""What those who submit tasks may name on the server's machine: only what its operator lists.

A task can name code to import, files to upload, folders to mount, and a runtime that contains
nothing. Each of these is refused with the field's name unless it is permitted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field

from bridle.config import Action, Settings, Task
from bridle.runtimes import RUNTIMES, chosen
from bridle.types import JSON

FOLDERS = ("bubblewrap", "apptainer")
"""Runtimes whose image is a folder or a file of the machine."""
NOT_LISTED = "is not in a folder that the operator lists"


class Permits(Settings):
    """What tasks that come over HTTP may name."""

    runtimes: tuple[str, ...] | None = None
    """Runtimes by name; `None` = every one that comes with Bridle, `local` only where the server
    listens on loopback."""
    import_paths: tuple[str, ...] = ()
    """`package.module:Class` or `package.module` prefixes that may be imported."""
    host_paths: tuple[Path, ...] = ()
    """Folders of the server's machine that tasks may name files and folders in."""
    remotes: tuple[JSON, ...] = ()
    """What runtime `remote` may be told in `kwargs`, each a table as a task would give it; `"*"` in
    the place of a value permits any. Such a host is reached with the server's own rights, so none
    is permitted that is not listed."""
    host_network: bool = False
    """Whether `network: host` is taken; such a runtime's network is `open`."""
    callbacks: tuple[str, ...] = ()
    """Addresses that callbacks may go to: host names, `*.example.org`, IP networks. Private,
    loopback and link-local ones only if their network (`127.0.0.0/8`) or name is listed; an empty
    list means every public address."""
    local: bool = Field(default=False, exclude=True)
    """Whether `local` is among the default runtimes; set by who knows where the server listens."""

    def refused(self, task: Task) -> Iterator[tuple[str, str]]:
        """Every field of a task that is not permitted, with the reason."""
        yield from self._runtime(task)
        agent = task.agent
        if agent.import_path is not None:
            yield from self._import("agent.import_path", agent.import_path)
        if agent.function is not None:
            yield from self._function("agent.function", agent.function, task)
        if agent.harness == "function" and agent.settings.get("python") is not None:
            yield from self._path("agent.settings.python", str(agent.settings["python"]), task)
        if agent.skills_path is not None:
            yield from self._path("agent.skills_path", agent.skills_path, task)
        if task.task_dir is not None:
            yield from self._path("task_dir", task.task_dir, task)
        yield from self._import("builder.strategy", task.builder.strategy)
        yield from self._evaluator(
            "evaluator", task.evaluator.strategy, task.evaluator.config, task
        )

    def _runtime(self, task: Task) -> Iterator[tuple[str, str]]:
        runtime = task.runtime
        backend = chosen(runtime).backend
        yield from self._backend("runtime.backend", backend)
        image = runtime.image or ""
        if image and backend in FOLDERS and "://" not in image:
            yield from self._path("runtime.image", image, task)
        for stage in ("prepare", "eval_prepare"):
            actions: tuple[Action, ...] = getattr(runtime, stage)
            for place, action in enumerate(actions):
                if action.source is not None:
                    yield from self._path(f"runtime.{stage}[{place}].source", action.source, task)
        if backend == "remote" and not any(_fits(runtime.kwargs, one) for one in self.remotes):
            yield "runtime.kwargs", "is no host of runtime 'remote' that the operator lists"
        for name in ("binds", "build"):
            given = runtime.kwargs.get(name, ())
            for path in [given] if isinstance(given, str) else given:
                yield from self._path(f"runtime.kwargs.{name}", str(path), task)

    def _backend(self, field: str, backend: str) -> Iterator[tuple[str, str]]:
        if ":" in backend:
            yield from self._import(field, backend)
            return
        known = sorted(RUNTIMES) if self.runtimes is None else sorted(self.runtimes)
        if self.runtimes is None and not self.local:
            known.remove("local")
        if backend in RUNTIMES and backend not in known:
            yield field, f"runtime {backend!r} is not permitted; permitted: {', '.join(known)}"

    def _import(self, field: str, name: str) -> Iterator[tuple[str, str]]:
        """Refuse a dotted path that is not listed; a short name passes."""
        module = name.partition(":")[0]
        listed = any(
            path in (name, module) or module.startswith(f"{path}.") for path in self.import_paths
        )
        if ":" in name and not listed:
            yield field, f"{name!r} may not be imported; the operator lists what may"

    def _function(self, field: str, name: str, task: Task) -> Iterator[tuple[str, str]]:
        if ".py:" in name:
            yield from self._path(field, name.rpartition(":")[0], task)
        else:
            yield from self._import(field, name)

    def _path(self, field: str, given: str, task: Task) -> Iterator[tuple[str, str]]:
        path = Path(task.task_dir or ".", given).resolve()
        if not any(path.is_relative_to(folder.resolve()) for folder in self.host_paths):
            yield field, f"{given!r} {NOT_LISTED}"

    def _evaluator(
        self, field: str, strategy: str, config: Mapping[str, object], task: Task
    ) -> Iterator[tuple[str, str]]:
        yield from self._import(f"{field}.strategy", strategy)
        if strategy == "harbor":
            tests = str(config.get("tests", "tests"))
            yield from self._path(f"{field}.config.tests", tests, task)
        if strategy == "function":
            yield from self._import(f"{field}.config.function", str(config.get("function", "")))
        if strategy == "swebench" and config.get("python") is not None:
            yield from self._path(f"{field}.config.python", str(config["python"]), task)
        parts = config.get("parts")
        if strategy == "composite" and isinstance(parts, list | tuple):
            for place, part in enumerate(parts):
                if isinstance(part, dict):
                    inner: JSON = part.get("config") or {}
                    name = f"{field}.config.parts[{place}]"
                    yield from self._evaluator(name, str(part.get("strategy")), inner, task)


def _fits(given: object, listed: object) -> bool:
    """Whether what is given is what is listed: all of it, and nothing else."""
    if isinstance(given, Mapping) and isinstance(listed, Mapping):
        return set(given) <= set(listed) and all(
            _fits(given.get(name), value) for name, value in listed.items()
        )
    return listed in ("*", given)


def names_files(task: Task) -> bool:
    """Whether a task names files or folders that its `task_dir` is needed to find."""
    without = task.model_copy(update={"task_dir": None})
    return any(reason.endswith(NOT_LISTED) for _, reason in Permits().refused(without))
