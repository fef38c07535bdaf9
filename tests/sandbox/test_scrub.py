"""An agent that looks for the reference patch in a scrubbed repository finds nothing."""

import pytest
from tests.node.leaky import MAKE, PROBES, SILENT
from tests.sandbox.images import spec_of
from tests.sandbox.test_sessions import played

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

FOUND = 'probe() { if (cd repo && eval "$2") 2>/dev/null | grep -q "$3"; then echo "$1"; fi; }\n'
SEARCH = (
    FOUND
    + "\n".join(
        f'probe "{name}" "$(cat <<\'END\'\n{command}\nEND\n)" {"." if name in SILENT else "FUTURE"}'
        for name, command in PROBES.items()
    )
    + "\n"
)


@pytest.mark.parametrize("scrub", [True, False])
async def test_scrub_git_removes_the_reference_patch_from_a_repository(tmp_path, backend, scrub):
    steps = [{"type": "exec", "command": MAKE}]
    steps += [{"type": "scrub_git", "target": "repo"}] if scrub else []
    runtime = {**await spec_of(backend, large=True), "prepare": steps}
    script = f'found=$({SEARCH})\necho "$found" >&2\n[ -z "$found" ] || exit 71'
    result = await played(tmp_path, backend, script, runtime=runtime)
    assert (result.status == "COMPLETED") is scrub, result.error
    if not scrub:
        assert "71" in result.error
