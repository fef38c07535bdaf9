import subprocess

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.harnesses.made import context

from bridle.config import AgentSpec
from bridle.errors import ConfigError
from bridle.harnesses.command import CommandHarness, fill


def harness(command, **options):
    return CommandHarness(AgentSpec(harness="command", command=command, **options))


def ran(launch):
    env = {"PATH": "/usr/bin:/bin", **launch.env}
    return subprocess.run(["bash", "-c", launch.command], env=env, capture_output=True, check=True)


texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=30)


@given(texts)
@example("'\"`id`$(id) ${HOME} \\ * ? ~ ! # ; & | \n <>()")
@example("{model}")
def test_placeholder_value_stays_one_word_for_any_content_and_quotes(text):
    words = (
        "{instruction}",
        '"{instruction}"',
        "'{instruction}'",
        "a{instruction}b",
        '"it\'s {instruction}"',
        "'\"{instruction}\"'",
        '\\"{instruction}\\"',
        '"$(echo -n "{instruction}")"',
    )
    line = " ".join(("printf '%s\\0'", *words))
    out = ran(harness(line).launch(context(instruction=text))).stdout.decode()
    *values, nested = out.split("\0")[:-1]
    assert values == [text, text, text, f"a{text}b", f"it's {text}", f'"{text}"', f'"{text}"']
    assert "uid=" not in nested


def test_every_placeholder_of_a_command_line_is_filled():
    names = (
        "instruction", "instruction_file", "base_url", "openai_base_url", "anthropic_base_url",
        "google_base_url", "model", "key", "workdir", "session_id", "task_id",
    )  # fmt: skip
    line = "printf '%s\\n' " + " ".join(f"{{{name}}}" for name in names)
    out = ran(harness(line).launch(context())).stdout.decode().splitlines()
    assert out == [
        "do it", "/h/instruction.txt", "http://gw/s/x/v1", "http://gw/s/x/v1", "http://gw/s/x",
        "http://gw/s/x", "bridle-policy", "key-1", "/w", "s-1", "t-1",
    ]  # fmt: skip


def test_shell_braces_and_unknown_placeholders_are_unchanged():
    line = "echo ${model} {a,b} '{print $1}' {instructions}"
    assert fill(line) == line


def test_sdk_environment_variables_are_set_and_the_instruction_is_written_to_a_file():
    launch = harness("true").launch(context())
    assert launch.env == {
        "OPENAI_BASE_URL": "http://gw/s/x/v1",
        "OPENAI_API_KEY": "key-1",
        "ANTHROPIC_BASE_URL": "http://gw/s/x",
        "ANTHROPIC_API_KEY": "key-1",
        "GOOGLE_GEMINI_BASE_URL": "http://gw/s/x",
        "GOOGLE_API_URL": "http://gw/s/x",
        "GEMINI_API_KEY": "key-1",
        "MODEL": "bridle-policy",
        "WORKDIR": "/w",
        "SESSION_ID": "s-1",
        "TASK_ID": "t-1",
        "SAMPLE_INDEX": "3",
        "INSTRUCTION_FILE": "/h/instruction.txt",
    }
    assert launch.files == {"/h/instruction.txt": b"do it"}


@pytest.mark.parametrize("instruction", ["x" * 200_000, "a\0b"])
def test_an_instruction_that_cannot_be_an_argument_is_refused_with_advice_to_use_the_file(
    instruction,
):
    with pytest.raises(ConfigError, match=r"use \{instruction_file\}"):
        harness("echo {instruction}").launch(context(instruction=instruction))
    launch = harness("cat {instruction_file}").launch(context(instruction=instruction))
    assert "INSTRUCTION" not in launch.env


@pytest.mark.parametrize("command", [None, "", "  "])
def test_command_needs_a_command_line(command):
    with pytest.raises(ConfigError, match=r"agent\.command: harness 'command' needs"):
        harness(command)


async def test_command_version_is_the_digest_of_the_command_line_unless_given(tmp_path):
    assert harness("true").version == harness("true").version != harness("false").version
    assert harness("true", version="7").version == "7"
    assert await harness("true").install(tmp_path, print) is None


def test_command_exit_code_0_is_success_and_others_are_failures():
    assert harness("true").exit_cause(0, None, b"") is None
    assert harness("true").exit_cause(3, None, b"") is not None
