from pathlib import Path

import pytest
from tests.harnesses.made import context

from bridle.config import AgentSpec, McpServer
from bridle.errors import ConfigError
from bridle.harnesses import ANY_PROGRAM, HARNESSES, default_agent, dialects_of, open_harness
from bridle.harnesses.base import crash
from bridle.harnesses.packaged import PyPI
from bridle.types import Cause, Dialect


@pytest.mark.parametrize("name", sorted(HARNESSES))
def test_every_name_in_the_table_opens_a_harness_of_that_name(name):
    harness = open_harness(name)
    assert harness.name == name
    assert harness.version


def test_guide_table_lists_the_harnesses():
    page = Path(__file__).parents[2] / "docs/guides/harnesses/index.md"
    result = {line for line in page.read_text().splitlines() if line.startswith("| `")}
    wanted = set()
    for name in HARNESSES:
        version = "-" if name in ANY_PROGRAM else open_harness(name).version
        dialects = ", ".join(f"`{dialect}`" for dialect in dialects_of(name))
        wanted.add(f"| `{name}` | {version} | {dialects} |")
    assert result == wanted


def test_dialects_of_a_harness_are_those_that_its_settings_allow():
    assert dialects_of("aider") == (Dialect.OPENAI_CHAT,)
    assert set(dialects_of("function")) == set(Dialect)


def test_an_unknown_harness_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match=r"unknown harness 'mini'; known: aider, .*command, .*pi"):
        open_harness("mini")


def test_a_custom_harness_is_found_by_its_import_path():
    path = "bridle.harnesses.command:CommandHarness"
    assert open_harness(AgentSpec(import_path=path, command="true")).name == "command"


@pytest.mark.parametrize("agent", [AgentSpec(), AgentSpec(harness="pi", import_path="a:B")])
def test_an_agent_must_give_exactly_one_of_harness_and_import_path(agent):
    with pytest.raises(ConfigError, match="exactly one of 'harness' and 'import_path'"):
        open_harness(agent)


@pytest.mark.parametrize("name", ["mini_swe_agent", "pi"])
def test_a_harness_version_other_than_the_pinned_is_recorded_as_unlocked(name):
    assert open_harness(AgentSpec(harness=name, version="0.0.1")).version == "0.0.1 (unlocked)"
    pinned = open_harness(name).version
    assert open_harness(AgentSpec(harness=name, version=pinned)).version == pinned


@pytest.mark.parametrize("version", ["", "latest", ">=2", "2 --index-url http://x", "2\nevil"])
def test_a_harness_version_that_is_not_one_exact_version_number_is_refused(version):
    with pytest.raises(ConfigError, match=r"agent\.version: .* is not the number of one version"):
        open_harness(AgentSpec(harness="pi", version=version))


@pytest.mark.parametrize("name", sorted(HARNESSES))
async def test_version_image_runs_a_program_of_the_image_or_is_refused(name, tmp_path):
    agent = default_agent(name).model_copy(update={"version": "image"})
    package = getattr(open_harness(name), "package", None)
    if isinstance(package, PyPI):
        with pytest.raises(
            ConfigError, match=rf"agent\.version: '{name}' is not run from an image"
        ):
            open_harness(agent)
        return
    harness = open_harness(agent)
    assert await harness.install(tmp_path, print) is None
    if package is not None:
        launch = harness.launch(context(bundle=""))
        assert launch.command[0] == package.command
        assert harness.version == "image (unlocked)"
        assert "COPILOT_PKG_CACHE_HOME" not in launch.env  # of the bundle


@pytest.mark.parametrize("name", ["mini_swe_agent", "pi"])
def test_a_packaged_harness_refuses_a_command_and_a_function(name):
    with pytest.raises(ConfigError, match=r"agent\.command: only harness 'command'"):
        open_harness(AgentSpec(harness=name, command="true"))
    with pytest.raises(ConfigError, match=r"agent\.function: only harness 'function'"):
        open_harness(AgentSpec(harness=name, function="a:b"))


@pytest.mark.parametrize("name", sorted(HARNESSES))
def test_unknown_setting_is_refused_by_name(name):
    agent = AgentSpec(harness=name, command=None, settings={"thinkin": "high"})
    with pytest.raises(ConfigError, match=rf"agent\.settings of harness '{name}': thinkin"):
        open_harness(agent)


@pytest.mark.parametrize("name", ["aider", "command", "function", "mini_swe_agent"])
def test_a_harness_without_an_mcp_client_refuses_mcp_servers(name):
    server = McpServer(name="a", command="serve")
    agent = AgentSpec(harness=name, command=None, mcp_servers=(server,))
    with pytest.raises(ConfigError, match=rf"agent\.mcp_servers: '{name}' cannot use 'a'"):
        open_harness(agent)


@pytest.mark.parametrize("name", sorted(set(HARNESSES) - {"aider", "command", "mini_swe_agent"}))
def test_a_skills_path_without_skills_is_refused_when_the_harness_is_opened(name, tmp_path):
    with pytest.raises(ConfigError, match=r"agent\.skills_path: "):
        open_harness(AgentSpec(harness=name, skills_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("exit_code", "signal", "cause"),
    [(0, None, None), (1, None, Cause.HARNESS_CRASH), (None, 9, Cause.HARNESS_CRASH)],
)
def test_an_exit_code_other_than_0_or_a_signal_is_a_crash(exit_code, signal, cause):
    assert crash(exit_code, signal) is cause
