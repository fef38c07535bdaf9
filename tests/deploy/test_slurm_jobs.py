"""`deploy/slurm` on a real Slurm of two machines (`make test-slurm`)."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from tests.cluster.test_batch import until_live
from tests.deploy.slurm import MACHINES, SLURMD_PORT, cluster

from bridle.client import AsyncClient

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "bridle.sbatch"
AGENT = ROOT / "tests" / "node" / "agent.py"
OPTIONS = ("--nodes=2", "--cpus-per-task=2", "--time=20")
TOKEN = "a-token-of-the-test"
SESSIONS = 8

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    assert "BRIDLE_TEST_SLURM" in os.environ, "run scripts/test-slurm"
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def config(tmp_path):
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"conversations": [{"turns": [{"content": "It is done."}]}]}))
    path = tmp_path / "bridle.toml"
    path.write_text(
        f'engines = ["scripted:{script}"]\n'
        f'[server]\nhost = "0.0.0.0"\nhosts = ["node1"]\nport = 8080\ndata = "{tmp_path}/data"\n'
        '[server.permits]\nruntimes = ["local"]\n'
        '[executor.ray]\nfolder = "/var/lib/bridle/nodes"\n'
    )
    return path


def submitted(slurm, config, *options, **env):
    given = {
        "BRIDLE_CONFIG": str(config),
        "BRIDLE_VENV": sys.prefix,
        "BRIDLE_SERVER_TOKEN": TOKEN,
        "TMPDIR": "/var/lib/bridle/tmp",
        **env,
    }
    return slurm.submit(SCRIPT, *OPTIONS, *options, **given)


def of_ray_or_bridle():
    """Command lines of what runs on any of the machines."""
    lines = [
        path.read_bytes().replace(b"\0", b" ") for path in Path("/proc").glob("[0-9]*/cmdline")
    ]
    return [line for line in lines if re.search(rb"raylet|gcs_server|bridle serve", line)]


async def test_a_slurm_job_serves_tasks_on_all_its_nodes_until_sigterm(slurm, config):
    job = submitted(slurm, config)
    task = {
        "task_id": "t",
        "instruction": "Do it.",
        "num_samples": SESSIONS,
        "max_attempts": 1,
        "runtime": {"backend": "local"},
        "agent": {"harness": "command", "command": f"sleep 3; {sys.executable} -S {AGENT}"},
    }
    async with AsyncClient("http://node1:8080", token=TOKEN, patience_s=120) as client:
        await until_live(client, len(MACHINES))
        await client.submit(task)
        group = await anext(client.groups(quiet_s=120))
    ended = [(one.status, one.error) for one in group.results]
    assert ended == [("COMPLETED", None)] * SESSIONS
    assert len({one.raw["node_id"] for one in group.results}) == len(MACHINES)
    assert of_ray_or_bridle() != []
    slurm.announce_end(job)
    answer = slurm.ended(job, within_s=100)
    assert (answer["JobState"], answer["ExitCode"]) == ("COMPLETED", "0:0"), slurm.output(job)
    assert of_ray_or_bridle() == []


def test_a_slurm_job_fails_with_code_2_when_the_server_refuses_its_config(slurm, config):
    config.write_text("nonsense = 1\n")
    answer = slurm.ended(job := submitted(slurm, config), within_s=100)
    assert (answer["JobState"], answer["ExitCode"]) == ("FAILED", "2:0"), slurm.output(job)
    assert "nonsense" in slurm.output(job)
    assert of_ray_or_bridle() == []


def test_a_real_slurm_job_fails_when_ray_does_not_start(slurm, config):
    job = submitted(slurm, config, "--nodes=1", BRIDLE_RAY_PORT=str(SLURMD_PORT))
    answer = slurm.ended(job, within_s=100)
    assert (answer["JobState"], answer["ExitCode"]) == ("FAILED", "1:0"), slurm.output(job)
    assert "Ray did not start on node" in slurm.output(job)
    assert of_ray_or_bridle() == []
