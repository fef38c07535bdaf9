"""The Slurm script with a `srun`, `scontrol` and `ray` that only say what they were given."""

import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bridle.cli.app import app

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "bridle.sbatch"
SLEEP = "sleep 30 >/dev/null 2>&1 &"
HOSTS = "echo node07; echo node08; echo node09"


@pytest.fixture
def job(script):
    """Runs the script in a job of three machines; `srun` is given as a shell script."""

    def run(srun='echo "$@"', **env):
        given = {
            "SLURM_JOB_NODELIST": "node[07-09]",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_CPUS_PER_TASK": "8",
        }
        return script(SCRIPT, {"scontrol": HOSTS, "srun": srun}, **given, **env)

    return run


def said(process):
    out, err = process.communicate(timeout=45)
    return process.returncode, out, err


def test_it_is_bash_and_its_options_are_slurm_s():
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0
    lines = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH ")]
    options = {line.split("--")[1].partition("=")[0] for line in lines}
    assert options == {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "signal"}


def test_a_dry_run_prints_what_a_run_runs(job):
    env = {"BRIDLE_CONFIG": "my bridle.toml", "BRIDLE_DATABASE": "postgresql://db/x"}
    code, dry, _ = said(job(BRIDLE_DRY_RUN="1", **env))
    assert code == 0
    code, ran, _ = said(job(srun='printf "%q " srun "$@"; echo', **env))
    assert (code, shlex.split(ran)) == (0, shlex.split(dry))


def test_ray_s_own_command_takes_its_options_and_the_server_its_own(job):
    _, dry, _ = said(job(BRIDLE_DRY_RUN="1", BRIDLE_CONFIG="b.toml"))
    words = shlex.split(dry)
    at, end = words.index("ray"), words.index("--")
    assert words[at : at + 2] == ["ray", "symmetric-run"]
    assert words[words.index("--address") + 1] == "node07:6379"
    assert words[words.index("--min-nodes") + 1] == "3"
    assert words[words.index("--resources") + 1] == '{"bridle_node": 1}'
    # What `symmetric-run` sets itself may not be given.
    assert not {"--head", "--node-ip-address", "--port", "--block"} & {*words[at:end]}
    server = words[end + 1 :]
    assert server == ["bridle", "serve", "--config", "b.toml", "--executor", "ray"]
    result = CliRunner().invoke(app, [*server[1:], "--help"])
    assert result.exit_code == 0


def test_without_a_config_it_says_so(job):
    code, _, err = said(job())
    assert code != 0
    assert "BRIDLE_CONFIG" in err


def test_the_end_that_slurm_announces_reaches_the_server_which_may_finish(job, tmp_path):
    srun = f"trap 'sleep 0.1; echo drained; kill $!; exit' TERM; {SLEEP} touch {tmp_path}/up; wait"
    process = job(srun=srun, BRIDLE_CONFIG="b.toml")
    while not (tmp_path / "up").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    code, out, _ = said(process)
    assert (code, out) == (0, "drained\n")


def test_a_server_that_fails_fails_the_job(job):
    assert said(job(srun="exit 3", BRIDLE_CONFIG="b.toml"))[0] == 3


def test_a_server_that_fails_before_it_is_waited_for_fails_the_job(job, ended_first):
    code, _, _ = said(job(srun="exit 3", BRIDLE_CONFIG="b.toml", **ended_first("step")))
    assert code == 3


def test_a_server_that_fails_at_once_fails_the_job_each_time(job):
    jobs = [job(srun="exit 3", BRIDLE_CONFIG="b.toml") for _ in range(50)]
    assert [said(one)[0] for one in jobs] == [3] * 50


def test_a_server_that_ends_with_the_job_keeps_its_status(job):
    srun = "trap '' TERM; kill -TERM $PPID; exit 3"
    jobs = [job(srun=srun, BRIDLE_CONFIG="b.toml") for _ in range(50)]
    assert [said(one)[0] for one in jobs] == [3] * 50


def test_a_server_that_fails_at_its_end_fails_the_job(job, tmp_path):
    srun = f"trap 'kill $!; exit 4' TERM; {SLEEP} touch {tmp_path}/up; wait"
    process = job(srun=srun, BRIDLE_CONFIG="b.toml")
    while not (tmp_path / "up").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert said(process)[0] == 4


def test_a_server_that_drains_is_waited_for_through_a_second_signal(job, tmp_path):
    drain = (
        f"touch {tmp_path}/signalled$((++n)); [ $n = 2 ] && kill $child && echo drained && exit 5"
    )
    start = "n=0; sleep 30 >/dev/null 2>&1 & child=$!"
    wait = "while kill -0 $child 2>/dev/null; do wait $child; done"
    srun = f"{start}; trap '{drain}' TERM; touch {tmp_path}/signalled0; {wait}"
    process = job(srun=srun, BRIDLE_CONFIG="b.toml")
    for name in ("signalled0", "signalled1"):
        while not (tmp_path / name).exists():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    code, out, _ = said(process)
    assert (code, out) == (5, "drained\n")
