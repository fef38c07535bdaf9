"""Traces, sessions and groups by hand: two calls with a tool's result between them."""

import numpy as np

from bridle.bridges.base import SessionGroup
from bridle.trajectory.sample import MaskReason, Trace, Trajectory

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
SYSTEM = {"role": "system", "content": "You fix tests."}
ASK = {"role": "user", "content": "Fix it."}
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"a": 1}'}}
CALLS = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "hm",
    "tool_calls": [CALL],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
DONE = {"role": "assistant", "content": "Done."}


def trace(name="t0", **changes):
    """Prompt 1 2 3; sampled 4 5; given 6 7; sampled 8 9 10."""
    sampled = np.array([1, 1, 0, 0, 1, 1, 1], np.uint8)
    fields = {
        "trace_id": name,
        "prompt_ids": np.array([1, 2, 3], np.int32),
        "response_ids": np.array([4, 5, 6, 7, 8, 9, 10], np.int32),
        "loss_mask": sampled,
        "response_logprobs": np.where(sampled, -0.5, 0).astype(np.float32),
        "versions": np.array([3, 3, -1, -1, 4, 4, 4], np.int32),
        "reasons": np.where(sampled, MaskReason.TRAINED, MaskReason.PROMPT).astype(np.uint8),
        "exchange_ids": ("e0", "e1"),
        "turn_ends": (2, 7),
        "finish_reason": "stop",
        "logprob_mode": "processed",
        "prompt_messages": [SYSTEM, ASK],
        "response_messages": [CALLS, RESULT, DONE],
        "tools": TOOLS,
    }
    return Trace(**(fields | changes))


def rows(tokens=10, known=9):
    """Experts of that many ids, in two layers, three of them each; the last are not known."""
    made = np.arange(tokens * 6, dtype=np.int16).reshape(tokens, 2, 3)
    made[known:] = -1
    return made


def session(name="s0", reward=1.0, *traces, status="COMPLETED", task="t", error=None):
    stats = {"stats": {"exchanges": 2}, "task_id": task, "train": ["agent"]}
    return Trajectory(name, status, traces, reward, error, stats)


def group(*sessions, task_id="t"):
    return SessionGroup(task_id, sessions)


class Player:
    """Gives prepared sessions, and notes what it is asked for, its weights and their versions."""

    def __init__(self, *sessions):
        self.sessions = list(sessions)
        self.asked = []
        self.weights = []
        self.versions = []

    def play(self, tasks):
        self.asked.append([task.task_id for task in tasks])
        return [self.sessions.pop(0) for _ in tasks]

    def update_weights(self, weights, version):
        self.weights.append((weights, version))

    def set_version(self, version):
        self.versions.append(version)
