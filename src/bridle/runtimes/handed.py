"""Variables on their way into a sandbox, past the programs of this machine that lead there.

What enters a sandbox and the `docker` command run outside, as us. A task's `LD_PRELOAD`, `PATH` or
`DOCKER_HOST` is for what runs inside, so outside every variable travels under another name, and the
bash that begins a command inside gives them theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "BRIDLE_IN_"

TAKE = (
    f'for BRIDLE_ in "${{!{PREFIX}@}}"; do export "${{BRIDLE_#{PREFIX}}}=${{!BRIDLE_}}"; '
    'unset "$BRIDLE_"; done; unset BRIDLE_; '
)
"""The bash that gives the variables their names; it stands before a command."""


def handed(env: Mapping[str, str]) -> dict[str, str]:
    """`env` under names that mean nothing to a program outside."""
    return {f"{PREFIX}{name}": value for name, value in env.items()}
