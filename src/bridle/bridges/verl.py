"""verl: an agent loop whose rollouts are sessions of real harnesses, with all their traces.

`docs/guides/verl.md` has verl's settings. Under `actor_rollout_ref.rollout.custom` stand
`bridle_server` (URL of `bridle serve`) and `bridle_tasks` (task file). The rows of the data set
name tasks: `extra_info.task_id`.

verl's V1 trainer (verl 0.9) takes several outputs from one agent loop: each trace is one, and all
have the advantage of their session, which counts once in its group. verl has one reward per
session and no weight per output: its `loss_agg_mode` weighs them, by tokens as it comes.
"""

from __future__ import annotations

import asyncio
import functools
import io
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import structlog

from bridle.bridges.base import (
    Row,
    SessionGroup,
    Shape,
    rows_of,
    warn_of_own_rewards,
)
from bridle.bridges.remote import ServerSessions, open_server
from bridle.errors import ConfigError
from bridle.experts import KEY as EXPERTS
from bridle.experts import complete_rows
from bridle.trajectory.sample import images_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridle.trajectory.sample import Trajectory

log = structlog.get_logger()

THREADS = 1024
"""Sessions that one agent-loop worker of verl waits for at a time, at most."""


def outputs_of(session: Trajectory, shape: Shape) -> list[Any]:
    """Return a session as verl's `AgentLoopOutput`s, one per trace; none if its reward is not
    known.

    A session without outputs has no part in its group's mean. One of which nothing trains has an
    output with mask 0. verl's own processor makes pixels of a trace's images.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    if session.reward is None:
        return []
    warn_of_own_rewards("verl", session)
    rows, counts = rows_of([SessionGroup("", (session,))], shape)
    if counts.left_out["overlong"]:
        log.warning("rows_too_long", session=session.session_id, rows=counts.left_out["overlong"])
    return [
        AgentLoopOutput(
            prompt_ids=row.prompt_ids.tolist(),
            response_ids=row.response_ids.tolist(),
            response_mask=row.mask.tolist(),
            response_logprobs=row.logprobs.tolist(),
            reward_score=session.reward,
            num_turns=len(row.trace.turn_ends),
            metrics=AgentLoopMetrics(),
            extra_fields=_extra(row),
            **_experts(row),
            **_images(row),
        )
        for row in rows
    ]


def _experts(row: Row) -> dict[str, Any]:
    """Return rows of all tokens but the last, which verl fills; nothing where one is not known."""
    rows = complete_rows(row.trace.routed_experts)
    return {} if rows is None else {EXPERTS: rows}


def _images(row: Row) -> dict[str, Any]:
    files = images_of(row.trace)
    if not files:
        return {}
    from PIL import Image

    pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    return {"multi_modal_data": {"images": pictures}}


def _extra(row: Row) -> dict[str, Any]:
    oldest, newest = row.lags or (None, None)
    return {
        "min_global_steps": oldest,
        "max_global_steps": newest,
        "token_versions": row.versions.tolist(),
        "bridle_session": row.session.session_id,
        "bridle_trace": row.trace.trace_id,
        "bridle_status": str(row.session.status),
        "reward_extra_info": {},
    }


class BridleAgentLoop:
    """An agent loop of verl that has one session played on a rollout server."""

    def __init__(self, trainer_config: Any, **_: object) -> None:  # noqa: ANN401 - verl's own
        """`trainer_config.config` is verl's whole config; verl's tokenizer and engine client are
        not used. `ConfigError` for missing settings, or a task file that cannot be read.
        """
        rollout = trainer_config.config.actor_rollout_ref.rollout
        custom = rollout.get("custom") or {}
        server, tasks = custom.get("bridle_server"), custom.get("bridle_tasks")
        if not server or not tasks:
            raise ConfigError(
                "verl's config must set both actor_rollout_ref.rollout.custom.bridle_server and "
                "actor_rollout_ref.rollout.custom.bridle_tasks"
            )
        self._sessions, self._tasks = open_server(str(server), str(tasks))
        self._shape = Shape(
            rollout.prompt_length, rollout.response_length, overlong="drop", blanks=True
        )

    async def run(
        self,
        sampling_params: object,
        *,
        extra_info: Mapping[str, Any],
        global_steps: int = 0,
        **_: object,
    ) -> list[Any]:
        """Run one session of the row's task; its sampling parameters are the task's, not verl's."""
        del sampling_params
        task = self._tasks[str(extra_info["task_id"])]
        # Weights of version k are those that verl has after step k.
        version = max(0, int(global_steps) - 1)
        played = await asyncio.get_running_loop().run_in_executor(
            _threads(), _played, self._sessions, task, version
        )
        return outputs_of(played, self._shape)


def _played(sessions: ServerSessions, task: Any, version: int) -> Trajectory:  # noqa: ANN401 - a task
    _set_version(sessions, version)
    (played,) = sessions.play([task])
    return played


@functools.cache
def _set_version(sessions: ServerSessions, version: int) -> None:
    """Set the version of samples, once per process: later calls for older batches do nothing."""
    sessions.set_version(version)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "bridle-session")
