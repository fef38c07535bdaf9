"""slime, and Miles, its sibling: rollout functions whose samples are traces of real sessions.

`docs/guides/slime.md` has slime's options. The data set's rows name tasks by `metadata.task_id` (or
by their prompt). `args.bridle_server` and `args.bridle_tasks`, from `--custom-config-path`, say
where they are played; so do the variables `BRIDLE_SERVER` and `BRIDLE_TASKS`. `args.bridle_engines`
is a file that gets the engines' addresses for `bridle serve --engines-from sglang:FILE`.

A session gives as many samples as it has traces. They share `rollout_id`, so the loss counts the
session once, and `group_index`. slime's own group normalisation needs as many samples in each
group; `post_process_rewards` counts each session once whatever number of samples it has. Fields and
signatures are those of slime at commit 624b824 and of Miles at 31f1ca9, which calls functions like
slime's in its newer rollout interface as well.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bridle.bridges.base import Row, RowCounts, SessionGroup, Sessions, Shape, TaskTable, rows_of
from bridle.bridges.remote import ServerSessions, open_server
from bridle.errors import ConfigError
from bridle.experts import complete_rows
from bridle.trajectory.credit import trace_advantages
from bridle.trajectory.sample import refuse_images
from bridle.types import FinishReason, SessionStatus

Sample = Any
"""slime's or Miles' own class."""


def generate_rollout(
    args: Any,  # noqa: ANN401 - slime's own
    rollout_id: int,
    data_source: Any,  # noqa: ANN401 - slime's own
    evaluation: bool = False,  # noqa: FBT001, FBT002 - slime calls it so
) -> Any:  # noqa: ANN401 - slime's own
    """Run the groups of slime's data source as sessions and return them as samples.

    This is a rollout function of slime (`--rollout-function-path`).
    """
    _name_engines(args)
    sessions, tasks = open_server(
        _setting(args, "bridle_server"),
        _setting(args, "bridle_eval_tasks" if evaluation else "bridle_tasks"),
    )
    if not evaluation:
        sessions.set_version(rollout_id)
    with _engines(args, sessions):
        if evaluation:
            return _evaluate(args, sessions, tasks)
        wanted = data_source.get_samples(args.rollout_batch_size)
        samples, counts = play_groups(sessions, tasks, wanted)
    return _output(samples, counts)


def _name_engines(args: Any) -> None:  # noqa: ANN401 - slime's own
    """Write the addresses of slime's engines to the file `args.bridle_engines`, if that is set.

    slime calls a rollout function while its engines serve. A server that waits for this file
    therefore never probes engines whose memory slime has.
    """
    if not (named := getattr(args, "bridle_engines", None)):
        return
    path, draft = Path(named), Path(f"{named}.new")
    draft.write_text(json.dumps(_workers(f"{args.sglang_router_ip}:{args.sglang_router_port}")))
    draft.replace(path)


def _workers(router: str) -> list[str]:
    """Return the engines that a router names: SGLang's router, or Miles' own."""
    for route in ("workers", "list_workers"):
        try:
            with urllib.request.urlopen(f"http://{router}/{route}", timeout=30) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as refused:
            with refused:  # it is an open reply
                if refused.code != 404:
                    raise
            continue
        urls = found.get("urls") or [one["url"] for one in found.get("workers", ())]
        return list(dict.fromkeys(url.partition("@")[0] for url in urls))
    raise ConfigError(
        f"the SGLang router {router} answers neither /workers nor /list_workers, so its engines "
        "are unknown"
    )


@contextmanager
def _engines(args: Any, sessions: ServerSessions) -> Iterator[None]:  # noqa: ANN401 - slime's own
    """Have engines that share slime's GPUs serve inside, and leave them alone afterwards.

    slime releases their memory once its rollout function returns.
    """
    if not _offloads(args):
        yield
        return
    sessions.take_back()
    try:
        yield
    finally:
        sessions.give_up()


def _offloads(args: Any) -> bool:  # noqa: ANN401 - slime's own
    """Return whether slime releases the engines' memory while it trains."""
    asked = getattr(args, "offload_rollout", None)
    return bool(getattr(args, "colocate", False) if asked is None else asked)


def generate_rollout_async(
    args: Any,  # noqa: ANN401 - slime's own
    rollout_id: int,
    data_source: Any,  # noqa: ANN401 - slime's own
    evaluation: bool = False,  # noqa: FBT001, FBT002 - slime calls it so
) -> Any:  # noqa: ANN401 - slime's own
    """Run the groups of slime's data source as sessions, also while slime trains.

    This is a rollout function for slime's `train_async.py`. Takes the groups that end first and
    leaves `bridle_ahead` others in progress (by default as many as two batches have), so a slow
    session comes in a later batch. `bridle_run` names the run on the server. `ConfigError` for
    engines that share slime's GPUs.
    """
    if evaluation:
        return generate_rollout(args, rollout_id, data_source, evaluation=True)
    if _offloads(args):
        raise ConfigError(
            "generate_rollout_async needs engines on GPUs of their own, and these share slime's "
            "GPUs: use generate_rollout"
        )
    _name_engines(args)
    sessions, tasks = open_server(_setting(args, "bridle_server"), _setting(args, "bridle_tasks"))
    # train_async.py begins a rollout before the update of the one before it.
    sessions.set_version(max(0, rollout_id - 1))
    count = args.rollout_batch_size
    ahead = _ahead(sessions, tasks, data_source, _setting(args, "bridle_run"))
    return _output(*ahead.take(rollout_id, count, int(getattr(args, "bridle_ahead", 2 * count))))


class Ahead:
    """Groups that a server plays ahead of need, taken in the order in which they end.

    The data source's `metadata`, which is part of slime's checkpoints, has those under way and
    those taken for the latest rollouts. A trainer that was killed gets the groups that its
    checkpoint has not trained again, by their names; no session is played twice.
    """

    def __init__(self, sessions: ServerSessions, tasks: TaskTable, source: Any, run: str) -> None:  # noqa: ANN401 - slime's own
        """Keep the settings; send the server nothing yet."""
        self._sessions, self._tasks, self._source, self._run = sessions, tasks, source, run
        self._groups: dict[str, Sequence[Sample]] = {}
        """By name: those under way, and those of the latest rollouts."""
        self._rollouts: dict[str, int] = {}
        """Of the groups that were taken."""
        self._ended: list[str] = []
        self._cursor = 0
        self._restored: list[Any] = list(source.metadata.get("bridle", ()))

    def take(
        self, rollout_id: int, count: int, ahead: int
    ) -> tuple[list[list[list[Sample]]], RowCounts]:
        """Keep `count + ahead` groups in progress, and return the samples of the first `count` that
        end.
        """
        trained = [name for name, of in self._rollouts.items() if of < rollout_id - 1]
        before = [
            f"{self._run}.{of[0]['group_index']}"
            for rollout, of in self._restored
            if rollout is not None and rollout < rollout_id
        ]
        self._sessions.ack([*trained, *before])
        for name in trained:
            del self._groups[name], self._rollouts[name]
        self._begin(rollout_id, count + ahead)
        while len(self._ended) < count:
            self._cursor, name = self._sessions.ended(self._cursor)
            if name in self._groups and name not in {*self._ended, *self._rollouts}:
                self._ended.append(name)
        names, self._ended = self._ended[:count], self._ended[count:]
        self._rollouts |= dict.fromkeys(names, rollout_id)
        self._source.metadata["bridle"] = [
            (self._rollouts.get(name), [sample.to_dict() for sample in samples])
            for name, samples in self._groups.items()
        ]
        templates = [self._groups[name] for name in names]
        return samples_of(
            [
                SessionGroup(
                    task_of(of[0]), tuple(self._sessions.fetch(name, task_of(of[0]), len(of)))
                )
                for name, of in zip(names, templates, strict=True)
            ],
            templates,
        )

    def _begin(self, rollout_id: int, wanted: int) -> None:
        """Hand in what is missing, and after a restart what the checkpoint has not trained."""
        again = [of for rollout, of in self._restored if rollout is None or rollout >= rollout_id]
        under_way = len(self._groups) - len(self._rollouts) + len(again)
        fresh = self._source.get_samples(max(wanted - under_way, bool(again)))
        fresh += [[type(fresh[0][0]).from_dict(sample) for sample in of] for of in again]
        self._restored = []
        groups = {f"{self._run}.{samples[0].group_index}": samples for samples in fresh}
        self._groups |= groups
        self._ended += self._sessions.hand_in(
            {name: (self._tasks[task_of(of[0])], len(of)) for name, of in groups.items()}
        )


_ahead = functools.cache(Ahead)


def play_groups(
    sessions: Sessions, tasks: TaskTable, wanted: Sequence[Sequence[Sample]]
) -> tuple[list[list[list[Sample]]], RowCounts]:
    """Run slime's groups as sessions; return, for each group and session, its samples, with counts.

    `wanted` are groups as a data source gives them: each sample names its task and has its
    `group_index` and `index`.
    """
    asked = [tasks[task_of(sample)] for group in wanted for sample in group]
    played = iter(sessions.play(asked))
    groups = [SessionGroup(task_of(of[0]), tuple(next(played) for _ in of)) for of in wanted]
    return samples_of(groups, wanted)


def task_of(sample: Sample) -> str:
    """Return the id of the task that a sample of slime's data set names."""
    return str((sample.metadata or {}).get("task_id") or sample.prompt)


def samples_of(
    groups: Sequence[SessionGroup], templates: Sequence[Sequence[Sample]]
) -> tuple[list[list[list[Sample]]], RowCounts]:
    """Return the sessions of groups as slime's samples, with counts.

    `templates` has one of slime's samples for each session. A session of which nothing trains is
    one sample with `remove_sample`. `TrainingError` for images.
    """
    for group in groups:
        for session in group.sessions:
            refuse_images("slime", session)
    rows, counts = rows_of(groups, Shape(blanks=True))
    advantages = _advantages(groups)
    of: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        of.setdefault((row.group, row.sample), []).append(row)
    return [
        [
            [
                _sample(row, template, advantages.get((place, at, row.trace.trace_id), {}))
                for row in of[place, at]
            ]
            for at, template in enumerate(templates[place])
        ]
        for place in range(len(groups))
    ], counts


def _sample(row: Row, template: Sample, advantages: dict[str, float]) -> Sample:
    sample = copy.copy(template)
    known_versions = row.versions[row.versions >= 0]
    sample.rollout_id = template.index
    sample.tokens = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    sample.response = "\n".join(_texts(row))
    sample.response_length = len(row.response_ids)
    sample.loss_mask = row.mask.tolist()
    sample.rollout_log_probs = row.logprobs.tolist()
    if (rows := complete_rows(row.trace.routed_experts)) is not None:
        sample.rollout_routed_experts = rows.astype(np.int32)
    sample.reward = row.reward
    sample.weight_versions = [str(version) for version in dict.fromkeys(known_versions.tolist())]
    sample.remove_sample = not row.mask.any()
    sample.status = _status(row, type(sample).Status)
    sample.metadata = {
        **(template.metadata or {}),
        "session_id": row.session.session_id,
        "trace_id": row.trace.trace_id,
        "session_status": str(row.session.status),
        "reward_known": row.known,
        "advantages": advantages,
    }
    return sample


def _texts(row: Row) -> list[str]:
    messages = row.trace.response_messages
    return [str(m.get("content") or "") for m in messages if m["role"] == "assistant"]


def _status(row: Row, status: Any) -> Any:  # noqa: ANN401 - slime's own
    if row.session.status == SessionStatus.COMPLETED:
        cut = row.trace.finish_reason == FinishReason.LENGTH
        return status.TRUNCATED if cut else status.COMPLETED
    ended_early = row.session.status in (SessionStatus.TIMEOUT, SessionStatus.CANCELLED)
    return status.ABORTED if ended_early else status.FAILED


def post_process_rewards(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:  # noqa: ANN401 - slime's own
    """Return raw rewards, and advantages within each group, in which each session counts once.

    This is a hook of slime. A session whose reward is not known has no part in its group's mean and
    gets 0. Where an evaluator gave traces rewards of their own, each is compared with those of its
    role.
    """
    kind = "grpo" if getattr(args, "grpo_std_normalization", True) else "dr_grpo"
    advantages = [sample.metadata["advantages"].get(kind, 0.0) for sample in samples]
    return [float(sample.reward) for sample in samples], advantages


def _advantages(groups: Sequence[SessionGroup]) -> dict[tuple[int, int, str], dict[str, float]]:
    """Return the advantages of each kind, by group, session and id of the trace."""
    found: defaultdict[tuple[int, int, str], dict[str, float]] = defaultdict(dict)
    for place, group in enumerate(groups):
        for kind in ("grpo", "dr_grpo"):
            by_session = trace_advantages(group.sessions, kind)[0]
            for at, own in enumerate(by_session):
                for trace, advantage in zip(group.sessions[at].traces, own, strict=True):
                    found[place, at, trace.trace_id][kind] = advantage
    return found


def _evaluate(args: Any, sessions: Sessions, tasks: TaskTable) -> Any:  # noqa: ANN401 - slime's own
    number = int(getattr(args, "n_samples_per_eval_prompt", 1) or 1)
    played = sessions.play([task for task in tasks for _ in range(number)])
    rewards = [0.0 if s.reward is None else s.reward for s in played]
    known = [s.reward for s in played if s.reward is not None]
    data = {"bridle": {"rewards": known or rewards, "truncated": [False] * len(known or rewards)}}
    metrics = {"eval/bridle/unknown": float(len(played) - len(known))}
    return _wrapped("RolloutFnEvalOutput", data, metrics)


def _output(samples: list[list[list[Sample]]], counts: RowCounts) -> Any:  # noqa: ANN401 - slime's own
    flat = [one for group in samples for of in group for one in of]
    masks = [float(np.mean(sample.loss_mask)) for sample in flat]
    metrics = counts.json("rollout/bridle") | {
        "rollout/bridle/trained_share": float(np.mean(masks))
    }
    return _wrapped("RolloutFnTrainOutput", samples, metrics)


def _wrapped(name: str, content: Any, metrics: dict[str, float]) -> Any:  # noqa: ANN401 - slime's own
    """Slime's or Miles' own output; what they take too, the bare content, where neither is."""
    for package in ("slime", "miles"):
        if importlib.util.find_spec(package) is not None:
            made = importlib.import_module(f"{package}.rollout.base_types")
            return getattr(made, name)(content, metrics)
    return content


def _setting(args: Any, name: str) -> str:  # noqa: ANN401 - slime's own
    value = getattr(args, name, None) or os.environ.get(name.upper())
    if not value:
        raise ConfigError(
            f"the setting {name} is missing: give it in slime's --custom-config-path, or as "
            f"environment variable {name.upper()}"
        )
    return str(value)
