"""A real Slurm: `munged`, `slurmctld` and machines with a `slurmd`, all of them on this computer.

Each machine has a host name, an address, processes and a disk of its own: namespaces of Linux. It
needs root, and a network and processes that are nobody else's: `scripts/test-slurm` gives both.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

HEAD = "10.77.0.1"
MACHINES = {"node1": "10.77.0.11", "node2": "10.77.0.12"}
CPUS = 2
SLURMD_PORT = 6818

CONFIG = """
ClusterName=test
SlurmctldHost=head({head})
SlurmctldPort=6817
SlurmdPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%h.pid
SlurmdSpoolDir={folder}/%h
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=30
MailProg=/bin/true
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
DISKS = ("/tmp/ray", "/var/lib/bridle")
"""Folders that each machine has for itself; the rest of the file system is one for all."""
MACHINE = """
set -e
hostname "$1"
for disk in {disks}; do mkdir -p "$disk" "$2$disk"; mount --bind "$2$disk" "$disk"; done
mkdir -p /var/lib/bridle/tmp
mount -t tmpfs tmpfs /dev/shm
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip link set lo up
ip addr add "$3/24" dev eth0
ip link set eth0 up
exec slurmd -D -N "$1"
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Slurm:
    """A running cluster. Use `cluster`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def submit(self, script: Path, *options: str, **env: str) -> int:
        """`sbatch`; returns the id of the job, whose output goes to `output(id)`."""
        words = ["sbatch", "--parsable", f"--output={self.folder}/%j.out", "--export=ALL"]
        return int(_said([*words, *options, script], {**os.environ, **env}))

    def output(self, job: int) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def job(self, job: int) -> dict[str, str]:
        """Return what `scontrol` says of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", _said(["scontrol", "show", "job", str(job)])))

    def ended(self, job: int, *, within_s: float) -> dict[str, str]:
        """Wait until a job has ended; what `scontrol` says of it."""
        until = time.monotonic() + within_s
        while (answer := self.job(job))["JobState"] not in ENDED:
            assert time.monotonic() < until, (answer["JobState"], self.output(job))
            time.sleep(0.2)
        return answer

    def announce_end(self, job: int) -> None:
        """Leave the job two minutes: Slurm signals what the script asks for."""
        ran = self.job(job)["RunTime"].split("-")[-1].split(":")
        minutes = int(ran[0]) * 60 + int(ran[1]) + 2
        _said(["scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}"])


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """`MACHINES` and their controller, with all their files in `folder`."""
    with ExitStack() as stack:
        socket.sethostname("head")
        _bridge(folder)
        munge = folder / "munge"
        munge.mkdir()
        munge.chmod(0o755)
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o400)
        (folder / "state").mkdir()
        names = [f"NodeName={name} NodeAddr={at} CPUs={CPUS}" for name, at in MACHINES.items()]
        config = folder / "slurm.conf"
        config.write_text(
            CONFIG.format(head=HEAD, port=SLURMD_PORT, folder=folder, nodes="\n".join(names))
        )
        os.environ["SLURM_CONF"] = str(config)
        stack.callback(os.environ.pop, "SLURM_CONF")
        files = {"key": "key", "socket": "socket", "pid": "pid", "seed": "seed", "log": "log"}
        places = [f"--{name}-file={munge / file}" for name, file in files.items()]
        places[1] = f"--socket={munge / 'socket'}"
        stack.enter_context(_running(folder, "munged", "--foreground", "--force", *places))
        _until((munge / "socket").exists, folder)
        stack.enter_context(_running(folder, "slurmctld", "-D"))
        for name, at in MACHINES.items():
            stack.enter_context(_machine(folder, name, at))
        _until(lambda: _idle() == len(MACHINES), folder)
        yield Slurm(folder)


def _bridge(folder: Path) -> None:
    """Make the network that the machines are put in, and their names."""
    hosts = {"localhost": "127.0.0.1", "head": HEAD, **MACHINES}
    (folder / "hosts").write_text("".join(f"{at} {name}\n" for name, at in hosts.items()))
    commands: list[list[str | Path]] = [
        ["mount", "--bind", folder / "hosts", "/etc/hosts"],
        ["ip", "link", "add", "machines", "type", "bridge"],
        ["ip", "addr", "add", f"{HEAD}/24", "dev", "machines"],
        ["ip", "link", "set", "machines", "up"],
    ]
    for words in commands:
        _said(words)


@contextmanager
def _machine(folder: Path, name: str, at: str) -> Iterator[None]:
    apart = ["--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child"]
    script = MACHINE.format(disks=" ".join(DISKS))
    start: list[str | Path] = ["bash", "-c", script, "bash", name, folder / f"{name}-disk", at]
    with _running(folder, "unshare", *apart, "--mount-proc", *start, log=name) as process:
        inside = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        _until(lambda: inside.read_text().split(), folder)
        [first] = inside.read_text().split()
        end = ["type", "veth", "peer", "name", "eth0", "netns", first]
        _said(["ip", "link", "add", f"to-{name}", *end])
        _said(["ip", "link", "set", f"to-{name}", "master", "machines", "up"])
        yield


@contextmanager
def _running(
    folder: Path, *words: str | Path, log: str | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{log or words[0]}.log").open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.kill()  # and with `--kill-child` all that runs on the machine
        process.wait()


def _idle() -> int:
    return _said(["sinfo", "--noheader", "--Node", "--format=%t"]).split().count("idle")


def _until(condition: Callable[[], object], folder: Path) -> None:
    until = time.monotonic() + 60
    while not condition():
        logs = {path.name: path.read_text()[-2000:] for path in folder.glob("*.log")}
        assert time.monotonic() < until, logs
        time.sleep(0.1)


def _said(words: Sequence[str | Path], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, env=env, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout
