"""A small Dockerfile as steps of a task, for runtimes that build no image.

Only what means the same on any Linux: `WORKDIR` (one), `COPY` into it, `ENV`, `RUN`. `FROM` is
passed over, so the author of a task has to say that its base image does not matter. Everything
else is refused by name: a step left out would be another task.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from bridle.errors import ConfigError
from bridle.types import JSON

MEANS_NOTHING_HERE = frozenset({"FROM", "CMD", "LABEL", "EXPOSE", "MAINTAINER"})
"""About the image or the container's own process, which a session does not start."""


@dataclass(slots=True)
class Steps:
    """What a Dockerfile does, as fields of `RuntimeSpec`."""

    workdir: str | None = None
    """Absolute; `None` = none is named."""
    env: dict[str, str] = field(default_factory=dict)
    prepare: list[JSON] = field(default_factory=list)
    """`Action` objects, with sources as absolute paths and targets relative to the workdir."""


def dockerfile_steps(path: Path) -> Steps:
    """The steps of a Dockerfile. `ConfigError` names the line that has no meaning here."""
    steps = Steps()
    for number, word, rest in _instructions(path.read_text(encoding="utf-8")):
        where = f"{path}:{number}: {word}"
        match word:
            case "WORKDIR":
                if steps.workdir not in (None, rest) or not rest.startswith("/"):
                    raise ConfigError(f"{where}: must be one absolute path, not {rest!r}")
                steps.workdir = rest
            case "ENV":
                steps.env.update(_pairs(rest, where))
            case "COPY":
                steps.prepare += _copies(shlex.split(rest), path.parent, steps.workdir, where)
            case "RUN":
                steps.prepare.append({"type": "exec", "command": rest})
            case _ if word not in MEANS_NOTHING_HERE:
                raise ConfigError(f"{where}: only a built image can have it: use runtime 'docker'")
    return steps


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line number, instruction in capitals, its arguments), continued lines joined."""
    begun, held = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (held or line.strip()):
            continue
        begun = begun if held else number
        held += line
        if held.rstrip().endswith("\\"):
            held = held.rstrip()[:-1]
            continue
        word, _, rest = held.strip().partition(" ")
        held = ""
        yield begun, word.upper(), rest.strip()


def _pairs(rest: str, where: str) -> dict[str, str]:
    if re.match(r"[A-Za-z_]\w*=", rest) is None:
        name, _, value = rest.partition(" ")
        return {name: value.strip()}
    pairs = [word.partition("=") for word in shlex.split(rest)]
    if any("$" in value for _, _, value in pairs):
        raise ConfigError(f"{where}: refers to another variable: use runtime 'docker'")
    return {name: value for name, _, value in pairs}


def _copies(words: list[str], folder: Path, workdir: str | None, where: str) -> Iterator[JSON]:
    *sources, target = words
    if not sources or any(word.startswith("--") for word in words):
        raise ConfigError(f"{where}: only 'COPY source... target' has a meaning here")
    base = PurePosixPath(workdir or "/")
    inside = PurePosixPath(workdir or "/", target)
    if workdir is None or not inside.is_relative_to(base) or ".." in inside.parts:
        raise ConfigError(f"{where}: its target must lie in the WORKDIR, not at {target!r}")
    relative = inside.relative_to(base)
    for source in sources:
        found = (folder / source).resolve()
        if not found.is_relative_to(folder.resolve()) or not found.exists():
            raise ConfigError(f"{where}: no such file beside it: {source!r}")
        if found.is_dir():
            yield {"type": "upload_dir", "source": str(found), "target": str(relative)}
            continue
        into = target.endswith(("/", ".")) or len(sources) > 1
        aim = relative / found.name if into else relative
        yield {"type": "upload_file", "source": str(found), "target": str(aim)}
