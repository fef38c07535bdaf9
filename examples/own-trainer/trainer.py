"""A trainer on the rollout server's HTTP contract, whole: the protocol is all that it knows.

    BRIDLE_SERVER_TOKEN=... python trainer.py http://127.0.0.1:8080 tasks.jsonl checkpoint.json

The token is no argument, because every user of the machine sees those.

Each step takes some groups, trains on them, writes a checkpoint that names them, and only then
acknowledges them. So every group is trained once, wherever the program is killed. The policy is a
weight for each token id, in place of a model. See docs/reference/trainer-protocol.md.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

GROUPS = 3
"""Groups of one step."""


class Row(NamedTuple):
    """One training sequence; arrays of one length."""

    session_id: str
    ids: Any
    mask: Any
    logprobs: Any
    versions: Any
    weight: float
    advantage: float


class Server:
    """The routes that a trainer needs."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send until the server answers; all of these requests can be sent twice."""
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/msgpack"}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        while True:
            request = urllib.request.Request(self.url + path, data, headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=90) as answer:
                    result = answer.read()
                    packed = answer.headers["Content-Type"] == "application/msgpack"
                    return msgspec.msgpack.decode(result) if packed else json.loads(result)
            except urllib.error.HTTPError as refused:
                if refused.code not in (429, 503):  # a full queue, a server that starts
                    raise SystemExit(f"{path}: {refused.read().decode()}") from refused
            except OSError:
                pass
            time.sleep(0.5)


def rows_of(group: dict) -> Iterator[Row]:
    """All traces of all sessions whose reward is known; those of a session weigh 1 together."""
    known = [one for one in group["results"] if one["reward"] is not None]
    mean = sum(one["reward"] for one in known) / max(1, len(known))
    for session in known:
        traces = session["trajectory"]["traces"]
        trained = sum(int(array(trace["loss_mask"]).sum()) for trace in traces)
        for trace in traces:
            mask = array(trace["loss_mask"])
            if not mask.any():
                continue
            before = len(array(trace["prompt_ids"]))
            ids = np.concatenate([array(trace["prompt_ids"]), array(trace["response_ids"])])
            mask, logprobs, versions = (
                np.pad(array(trace[name]), (before, 0))
                for name in ("loss_mask", "response_logprobs", "versions")
            )
            weight = float(mask.sum() / trained)
            advantage = session["reward"] - mean
            yield Row(session["session_id"], ids, mask, logprobs, versions, weight, advantage)


def array(packed: dict) -> Any:
    return np.frombuffer(packed["data"], packed["dtype"])


def loss_step(policy: dict[str, float], rows: Iterator[Row]) -> None:
    """Move the weights of the sampled ids; each token has its part of its session's weight."""
    for row in rows:
        share = row.advantage * row.weight / row.mask.sum()
        for token in row.ids[row.mask == 1].tolist():
            policy[str(token)] = policy.get(str(token), 0.0) + 0.1 * share


def save(path: Path, state: dict) -> None:
    """Replace the checkpoint as a whole: it is the old one or the new one."""
    fresh = path.with_suffix(".new")
    with fresh.open("w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)


def main(url: str, tasks_file: str, checkpoint: str) -> None:
    server, path = Server(url, os.environ["BRIDLE_SERVER_TOKEN"]), Path(checkpoint)
    state = json.loads(path.read_text()) if path.exists() else {"steps": [], "policy": {}}
    tasks = [json.loads(line) for line in Path(tasks_file).read_text().splitlines()]
    # 1. Hand in: a task that the server has is not run again.
    server.ask("POST", "/v1/tasks", {"tasks": tasks})
    while True:
        # 2. Say what is trained, and under which version sessions start from here on. After a
        #    kill this repeats the last step's.
        trained = [task_id for step in state["steps"] for task_id in step]
        if state["steps"]:
            server.ask("POST", "/v1/groups/ack", {"task_ids": state["steps"][-1]})
        # The engines have to have the weights: "hold", load, and {"version", "hold": false}.
        server.ask("POST", "/policy", {"version": len(state["steps"])})
        left = len(tasks) - len(trained)
        print(f"step {len(state['steps'])}: {left} groups left", flush=True)
        if not left:
            return
        # 3. Take groups as they end.
        groups: list[dict] = []
        cursor = 0
        while len(groups) < min(GROUPS, left):
            query = f"cursor={cursor}&limit={min(GROUPS, left) - len(groups)}&wait_s=30"
            answer = server.ask("GET", f"/v1/groups?{query}&include=trajectories")
            groups += answer["groups"]
            cursor = answer["cursor"]
        print(f"groups {[group['task_id'] for group in groups]}", flush=True)
        # 4. Train, and write down weights and groups at once.
        for group in groups:
            loss_step(state["policy"], rows_of(group))
        state["steps"].append([group["task_id"] for group in groups])
        save(path, state)
        print("saved", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
