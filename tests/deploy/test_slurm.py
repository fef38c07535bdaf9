"""The Slurm script with a Slurm, a `ray` and a `bridle` that only say what they were given.

What a real Slurm makes of it: `test_slurm_jobs`.
"""

import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bridle.cli.__main__ import app

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "bridle.sbatch"
SLEEP = "sleep 30 >/dev/null 2>&1 &"
SAYS = 'echo "${0##*/} ${*@Q}" >> $AT/ran;'  # in one piece: several do so at once
UNTIL_SIGNAL = f"trap 'kill $!; exit' TERM; {SLEEP} wait"
PROGRAMS = {
    "scontrol": "echo node07; echo node08; echo node09",
    "getent": "[ $2 = node07 ] || exit; echo 10.0.0.7 STREAM; echo 10.0.0.7 DGRAM",
    "scancel": f"{SAYS} kill $(<$AT/srun.$PPID)",
    "srun": f"{SAYS} echo $$ > $AT/srun.$PPID; {UNTIL_SIGNAL}",
    "ray": f'[ "$1" = start ] || exit 0; {SAYS} {UNTIL_SIGNAL}',
}


@pytest.fixture
def job(script, tmp_path):
    """Runs the script in a job of three machines; `bridle` is given as a shell script."""

    def run(bridle="exit 0", programs=(), **env):
        given = {
            "SLURM_JOB_ID": "5",
            "SLURM_JOB_NODELIST": "node[07-09]",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_CPUS_PER_TASK": "8",
            "AT": str(tmp_path),
        }
        return script(SCRIPT, PROGRAMS | {"bridle": bridle} | dict(programs), **(given | env))

    return run


def said(process):
    out, err = process.communicate(timeout=45)
    return process.returncode, out, err


def test_the_slurm_script_is_valid_bash_with_the_expected_sbatch_options():
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0
    lines = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH ")]
    options = {line.split("--")[1].partition("=")[0] for line in lines}
    assert options == {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "signal"}


def words_of(lines, first):
    """The only command of `first`."""
    [found] = [words for words in map(shlex.split, lines.splitlines()) if words[0] == first]
    return found


def test_a_slurm_dry_run_prints_the_commands_that_a_run_executes(job, tmp_path):
    env = {"BRIDLE_CONFIG": "my bridle.toml", "BRIDLE_DATABASE": "postgresql://db/x"}
    code, dry, _ = said(job(BRIDLE_DRY_RUN="1", **env))
    assert code == 0
    until_all_ran = "until [ $(wc -l < $AT/ran) = 3 ]; do :; done"
    code, _, _ = said(job(f"{SAYS} env | grep ^RAY_ADDRESS >> $AT/address; {until_all_ran}", **env))
    ran = (tmp_path / "ran").read_text()
    assert code == 0
    assert words_of(ran, "ray") == words_of(dry, "ray")
    assert words_of(ran, "srun") == words_of(dry, "srun")
    server = words_of(dry, "env")
    assert words_of(ran, "bridle") == server[2:]
    assert (tmp_path / "address").read_text() == f"{server[1]}\n"
    assert words_of(ran, "scancel") == ["scancel", "--signal=TERM", "5.0"]


def test_every_slurm_node_joins_the_ray_head_of_the_first_node_which_runs_the_server(job):
    _, dry, _ = said(job(BRIDLE_DRY_RUN="1", BRIDLE_CONFIG="b.toml"))
    head, others, server = (words_of(dry, name) for name in ("ray", "srun", "env"))
    at = others.index("ray")
    assert [*head[:2], "--head"] == [*others[at : at + 2], head[head.index("--head")]]
    assert head[head.index("--node-ip-address") :] == [
        *("--node-ip-address", "10.0.0.7", "--port", "6379"),
    ]
    assert others[-2:] == ["--address", "10.0.0.7:6379"]
    assert {"--nodes=2", "--ntasks=2", "--exclude=node07"} <= {*others[:at]}
    for words in (head, others[at:]):
        assert words[words.index("--resources") + 1] == '{"bridle_node": 1}'
        assert words[words.index("--num-cpus") + 1] == "8"
        assert "--block" in words
    assert server[1] == "RAY_ADDRESS=10.0.0.7:6379"
    assert server[2:] == ["bridle", "serve", "--config", "b.toml", "--executor", "ray"]
    assert CliRunner().invoke(app, [*server[3:], "--help"]).exit_code == 0


def test_a_slurm_job_of_one_node_runs_no_srun(job, tmp_path):
    env = {"BRIDLE_CONFIG": "b.toml", "SLURM_JOB_NUM_NODES": "1"}
    _, dry, _ = said(job(BRIDLE_DRY_RUN="1", **env))
    assert "srun" not in dry
    assert said(job(**env))[0] == 0
    assert "srun" not in (tmp_path / "ran").read_text()


def test_the_slurm_script_fails_without_bridle_config(job):
    code, _, err = said(job())
    assert code != 0
    assert "BRIDLE_CONFIG" in err


def test_sigterm_from_slurm_reaches_the_server_which_drains(job, tmp_path):
    bridle = f"trap 'sleep 0.1; echo drained; kill $!; exit' TERM; {SLEEP} touch $AT/up; wait"
    process = job(bridle, BRIDLE_CONFIG="b.toml")
    while not (tmp_path / "up").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    code, out, _ = said(process)
    assert (code, out) == (0, "drained\n")


def test_a_slurm_job_exits_with_the_code_of_its_failed_server(job):
    assert said(job("exit 3", BRIDLE_CONFIG="b.toml"))[0] == 3


def test_a_slurm_job_exits_with_the_code_of_a_server_that_fails_before_the_wait(job, ended_first):
    code, _, _ = said(job("exit 3", BRIDLE_CONFIG="b.toml", **ended_first("serving")))
    assert code == 3


def test_a_slurm_job_exits_with_the_code_of_a_server_that_fails_at_once_in_50_runs(job):
    jobs = [job("exit 3", BRIDLE_CONFIG="b.toml") for _ in range(50)]
    assert [said(one)[0] for one in jobs] == [3] * 50


def test_the_slurm_script_survives_signals_at_any_moment(job, often_signalled):
    bridle, sleep, signal_often = often_signalled
    process = job(bridle, sleep, BRIDLE_CONFIG="b.toml")
    signal_often(process)
    assert said(process) == (3, "", "")


def test_a_slurm_job_keeps_the_exit_code_of_a_server_that_ends_during_sigterm(job):
    bridle = "trap '' TERM; kill -TERM $PPID; exit 3"
    jobs = [job(bridle, BRIDLE_CONFIG="b.toml") for _ in range(50)]
    assert [said(one)[0] for one in jobs] == [3] * 50


def test_a_slurm_job_exits_with_the_code_of_a_server_that_fails_to_drain(job, tmp_path):
    bridle = f"trap 'kill $!; exit 4' TERM; {SLEEP} touch $AT/up; wait"
    process = job(bridle, BRIDLE_CONFIG="b.toml")
    while not (tmp_path / "up").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert said(process)[0] == 4


def test_a_slurm_job_waits_for_a_draining_server_after_a_second_sigterm(job, tmp_path):
    drain = (
        f"touch {tmp_path}/signalled$((++n)); [ $n = 2 ] && kill $child && echo drained && exit 5"
    )
    start = "n=0; sleep 30 >/dev/null 2>&1 & child=$!"
    wait = "while kill -0 $child 2>/dev/null; do wait $child; done"
    bridle = f"{start}; trap '{drain}' TERM; touch {tmp_path}/signalled0; {wait}"
    process = job(bridle, BRIDLE_CONFIG="b.toml")
    for name in ("signalled0", "signalled1"):
        while not (tmp_path / name).exists():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    code, out, _ = said(process)
    assert (code, out) == (5, "drained\n")


def test_a_slurm_job_fails_when_ray_does_not_start(job):
    ray = "sleep 0.2; exit 1"
    code, _, err = said(job(programs={"ray": ray}, BRIDLE_CONFIG="b.toml"))
    assert (code, err) == (1, "bridle.sbatch: Ray did not start on node07\n")


def test_sigterm_before_ray_is_up_ends_the_slurm_job_without_a_server(job, tmp_path):
    ray = f'[ "$1" = start ] || {{ touch $AT/up; exit 1; }}; {UNTIL_SIGNAL}'
    process = job("touch $AT/served", programs={"ray": ray}, BRIDLE_CONFIG="b.toml")
    while not (tmp_path / "up").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert said(process)[0] == 0
    assert not (tmp_path / "served").exists()
