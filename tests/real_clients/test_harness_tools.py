"""Codex with model names that it knows: tools that are no plain functions, run for real.

With one it has a freeform `apply_patch`; with the other its tools come as an item of the input, in
namespaces, and its only way to act is a freeform `exec` that runs JavaScript. The model is shown
functions in both cases, and its calls go out in the types that Codex runs.
"""

import pytest
from tests.real_clients.real import did_its_work, run

pytestmark = [
    pytest.mark.harnesses,
    pytest.mark.drawn_with("codex"),
    pytest.mark.timeout(1800),
]

PATCH = "*** Begin Patch\n*** Add File: made.txt\n+hello\n*** End Patch\n"
SCRIPT = "text(await tools.exec_command({cmd: 'echo hello > made.txt'}))"


@pytest.mark.parametrize(
    ("model", "tool", "given"),
    [("gpt-5.5", "apply_patch", PATCH), ("gpt-6-sol", "functions__exec", SCRIPT)],
)
async def test_codex_s_freeform_tools_are_called_as_custom_tool_calls(tmp_path, model, tool, given):
    result, exchanges = await run(
        tmp_path,
        "codex",
        agent={"model_name": model},
        check='test "$(cat made.txt)" = hello',
        turns=[
            {"content": "I do.", "tool_calls": [{"name": tool, "arguments": {"input": given}}]},
            {"content": "It is done."},
        ],
    )
    did_its_work(result, exchanges, calls=2)
    assert b'"type":"custom_tool_call"' in exchanges[0].reply
