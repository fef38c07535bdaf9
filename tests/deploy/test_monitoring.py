"""Alerts and panels: they name numbers that there are, and a real Prometheus takes them."""

import asyncio
import json
import re
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types
from tests.cli.test_serve import script, tasks

from bridle.cli.config import load_config
from bridle.cli.serve import server_of
from bridle.client import AsyncClient

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
HERE = Path(__file__).resolve().parent
UNPACKED = Path(__file__).resolve().parents[2] / ".cache" / "prometheus" / "usr" / "bin"

QUIET = {
    "Refusals and faults of the server, a minute": "nothing was refused",
    "Replies that reached nobody, and prompts that broke": "all replies were taken",
}
"""Panels of which a part stays empty when all is well."""


def alerts():
    """Name -> expression."""
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def panels():
    """Title -> expressions, for every server."""
    found = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    return {
        panel["title"]: [one["expr"].replace("$instance", ".*") for one in panel["targets"]]
        for panel in found
        if panel["type"] != "row"
    }


def names_in(text):
    """The samples that a Prometheus text can have."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        endings = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found |= {name + ending for ending in endings}
    return found


def a_server_of(tmp_path):
    """A whole server on a scripted engine."""
    config = load_config(
        None,
        engines=[f"scripted:{script(tmp_path)}"],
        server={"port": 0, "data": tmp_path / "data"},
        executor={"node": {"run_slots": 2}},
    )
    return server_of(config)


@pytest.mark.timeout(60)
async def test_a_server_exports_every_metric_that_alerts_and_panels_use(tmp_path):
    async with a_server_of(tmp_path) as served, httpx.AsyncClient() as http:
        known = {"authorization": f"Bearer {served.token_file.read_text().strip()}"}
        result = names_in((await http.get(f"{served.url}/metrics", headers=known)).text)
    asked = [*alerts().values(), *(one for several in panels().values() for one in several)]
    named = {name for expression in asked for name in re.findall(r"\bbridle_\w+", expression)}
    assert named - result == set()
    assert len(named) > 25


def test_every_alert_has_a_severity_a_summary_and_an_action():
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert {"summary", "action"} == {*rule["annotations"]}


@pytest.mark.browser
def test_each_alert_passes_its_promtool_tests(tmp_path):
    text = (HERE / "alerts.test.yaml").read_text()
    assert all(f'alertname="{name}"' in text for name in alerts())
    rules = tmp_path / "test.yaml"
    rules.write_text(text.replace("[ALERTS]", f"[{FOLDER / 'alerts.yaml'}]"))
    for words in (("test", "rules", rules), ("check", "config", FOLDER / "prometheus.yaml")):
        command = [program("promtool"), *words]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.browser
@pytest.mark.timeout(240)
async def test_every_panel_has_data_in_a_prometheus_that_scrapes_a_server(tmp_path):
    async with a_server_of(tmp_path) as served, AsyncClient(served.url) as client:
        with scraping(tmp_path, served) as prometheus:
            await until_scraped(prometheus, "up == 1")
            await client.submit_many(tasks(3))
            for number in range(3):
                await client.wait(f"task-{number}", timeout_s=60)
            async with httpx.AsyncClient(base_url=prometheus) as http:
                async with asyncio.timeout(120):
                    while await empty_panels(http) - {*QUIET}:  # noqa: ASYNC110 - a rate is of two looks
                        await asyncio.sleep(1)
                rules = (await http.get("/api/v1/rules")).json()["data"]["groups"]
    states = {rule["name"]: (rule["health"], rule["state"]) for rule in rules[0]["rules"]}
    assert {*states} == {*alerts()}
    assert all(health != "err" for health, _ in states.values())


async def empty_panels(http):
    """The panels of which some expression has no answer."""
    empty = set()
    for title, expressions in panels().items():
        for expression in expressions:
            response = await http.get("/api/v1/query", params={"query": expression})
            assert response.status_code == 200, (title, response.text)
            empty |= set() if response.json()["data"]["result"] else {title}
    return empty


def program(name):
    """A program of Debian's package `prometheus`."""
    found = UNPACKED / name
    assert found.exists(), f"{found} is not there: make test-browser unpacks it"
    return found


@contextmanager
def scraping(folder, served):
    """A Prometheus with our alerts that looks at a server each second; its URL."""
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / "alerts.yaml")]
    config["scrape_configs"] = config["scrape_configs"][:1]
    config["scrape_configs"][0]["static_configs"] = [
        {"targets": [served.url.removeprefix("http://")]}
    ]
    known = {"credentials_file": str(served.token_file)}
    config["scrape_configs"][0]["authorization"] = known
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=30)


async def until_scraped(url, expression):
    """Wait until a query has an answer."""
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=url) as http:
        while True:
            try:
                response = await http.get("/api/v1/query", params={"query": expression})
                if response.status_code == 200 and response.json()["data"]["result"]:
                    return
            except httpx.TransportError:
                pass  # it is not up yet
            await asyncio.sleep(0.2)
