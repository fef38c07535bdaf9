"""The light agent: what it sends, and what it makes of odd arguments."""

import subprocess
import sys

import pytest

from examples.demo import light_agent


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"name": "a"}', "41"),
        ('{"name": "b"}', "no such file"),
        ("{", "no such file"),
        ("[]", "no such file"),
        ('{"path": "a"}', "no such file"),
    ],
)
def test_malformed_tool_arguments_never_crash_the_light_agent(tmp_path, arguments, result):
    (tmp_path / "a").write_text("41")

    assert light_agent.read(tmp_path, arguments) == result


def test_the_light_agent_needs_only_the_standard_library():
    code = "import examples.demo.light_agent, sys; print('aiohttp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)

    assert done.stdout.strip() == "False"
