"""The Compose file and the image, as far as they can be tried without a daemon."""

import json
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types
from tests.deploy.shapes import COMPOSE, faults

from bridle.cli.config import load_config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_the_compose_file_has_only_fields_of_the_compose_specification(compose):
    own = {name: value for name, value in compose.items() if not name.startswith("x-")}
    assert list(faults(own, COMPOSE)) == []


def test_services_volumes_and_ports_that_compose_services_refer_to_exist(compose):
    services = compose["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in services, name
            assert how["condition"] != "service_healthy" or "healthcheck" in services[other]
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in compose["volumes"]
    config = load_config(DEPLOY / "bridle.toml")
    for engine in config.engines:
        _, host, port = re.split(r"://|:(?=\d)", engine)
        assert f"--port={port}" in services[host]["command"]
        [model] = re.findall(r"--model=(\S+)", " ".join(services[host]["command"]))
        assert services["server"]["environment"]["BRIDLE_TOKENIZER"] == model
        assert model == f"${{MODEL:-{config.tokenizer}}}"
    node = services["node"]["command"]
    assert "--address=server:6379" in node
    [resources] = [word for word in node if word.startswith("--resources=")]
    assert json.loads(resources.partition("=")[2]) == {config.executor.ray.resource: 1}
    assert f"127.0.0.1:${{PORT:-8080}}:{config.server.port}" in services["server"]["ports"]
    assert f"data:{config.server.data}" in services["server"]["volumes"]


def test_secrets_of_the_compose_file_have_no_default(compose):
    text = (DEPLOY / "compose.yaml").read_text()
    for name in ("POSTGRES_PASSWORD", "BRIDLE_SERVER_TOKEN"):
        assert f"{name}: ${{{name}:?}}" in text
    assert not re.search(r"(PASSWORD|TOKEN)\b[^\n]*:-", text)


def test_the_compose_engine_is_started_with_the_documented_vllm_flags(compose):
    command = compose["services"]["engine"]["command"]
    page = (DEPLOY.parent / "docs" / "guides" / "engines.md").read_text()
    [line] = re.findall(r"DEV_MODE=1 vllm serve MODEL (.*)", page)
    asked = line.replace("--logprobs-mode ", "--logprobs-mode=").split()
    assert {word for word in asked if word.startswith("--")} <= {*command}


def test_the_dockerfile_copies_existing_files_and_installs_from_locks():
    text = (DEPLOY / "Dockerfile").read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (DEPLOY.parent / source).exists(), source
    for locked in re.findall(r"-r (\S+)", text):
        assert (DEPLOY.parent / locked).exists()
    assert "bubblewrap" in text


def test_the_dockerfile_preloads_a_library_that_it_installs():
    text = (DEPLOY / "Dockerfile").read_text()
    [name, version] = re.findall(r"^ENV LD_PRELOAD=(lib\w+)\.so\.(\d+)$", text, re.MULTILINE)[0]
    assert f" {name}{version} " in text.split("ENV", 1)[0]
