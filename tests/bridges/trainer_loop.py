"""The order in which a trainer calls its bridge, in a process of its own that may be killed.

    python trainer_loop.py TRAINER SERVER TASKS CHECKPOINT STEPS

A step takes two groups of two sessions each. A checkpoint has what was trained and where the data
set stands, as the trainers' own have. Says a line before and after each.
"""

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from tests.bridges.samples import Sample

from bridle.bridges.base import play
from bridle.bridges.nemo import train_batch, verify_response
from bridle.bridges.remote import open_server
from bridle.bridges.slime import generate_rollout, generate_rollout_async
from bridle.bridges.verl import BridleAgentLoop

SAMPLES, BATCH = 2, 2


class Source:
    """Groups over the tasks, as slime's data source gives them."""

    def __init__(self, names):
        self.names, self.given, self.metadata = names, 0, {}

    def get_samples(self, count):
        numbers = range(self.given, self.given + count)
        self.given += count
        return [[self.sample(number, at) for at in range(SAMPLES)] for number in numbers]

    def sample(self, number, at):
        task = {"task_id": self.names[number % len(self.names)]}
        return Sample(group_index=number, index=SAMPLES * number + at, metadata=task)


class Slime:
    """slime's and Miles' `train.py`: a rollout, then its training."""

    rollout_function = staticmethod(generate_rollout)
    ahead = False
    """The next rollout begins before the training of this one, as in `train_async.py`."""

    def __init__(self, server, tasks):
        self.source = Source(names_of(tasks))
        self.args = SimpleNamespace(
            bridle_server=server, bridle_tasks=tasks, bridle_run="one", rollout_batch_size=BATCH
        )

    def load(self, state):
        self.source.given, self.source.metadata = state

    def state(self):
        return self.source.given, self.source.metadata

    def take(self, step):
        """Return the numbers of the groups of a step."""
        groups = self.rollout_function(self.args, step, self.source)
        return [of[0][0].group_index for of in groups]


class SlimeAsync(Slime):
    rollout_function = staticmethod(generate_rollout_async)
    ahead = True


class ByPrompt:
    """A trainer whose data set gives prompts in an order, and whose checkpoint has its place."""

    ahead = False

    def __init__(self, server, tasks):
        self.names, self.place = names_of(tasks), 0
        self.sessions, self.tasks = open_server(server, tasks)

    def load(self, state):
        self.place = state

    def state(self):
        return self.place

    def played(self, step, names):
        """Have tasks played; for each the ids of its sessions that reached the trainer."""
        raise NotImplementedError

    def take(self, step):
        numbers = [*range(self.place, self.place + BATCH)]
        self.place += BATCH
        names = [self.names[number % len(self.names)] for number in numbers]
        for name, of in zip(names, self.played(step, names), strict=True):
            assert [one.startswith(f"{name}.") for one in of] == [True] * SAMPLES, (name, of)
        return numbers


class NemoRl(ByPrompt):
    """A loop over NeMo RL's policy, with its batch of all traces."""

    def played(self, step, names):
        self.sessions.set_version(step)
        groups = play(self.sessions, [self.tasks[name] for name in names], SAMPLES)
        _, rows = train_batch(groups, pad_id=0)
        return [[r.session.session_id for r in rows if r.group == n] for n in range(len(names))]


class NemoGym(ByPrompt):
    """NeMo RL's rollouts through Gym: a request to `/run` for each session of each prompt."""

    def played(self, step, names):
        def run(name):
            (played,) = self.sessions.play([self.tasks[name]])
            answer = verify_response(played, {"input": name})
            return answer["response"]["metadata"]["session_id"]

        with ThreadPoolExecutor() as threads:
            found = threads.map(run, [name for name in names for _ in range(SAMPLES)])
            return [[next(found) for _ in range(SAMPLES)] for _ in names]


class Verl(ByPrompt):
    """verl's agent-loop workers: a loop for each session of each prompt, all at once."""

    def __init__(self, server, tasks):
        super().__init__(server, tasks)
        custom = {"bridle_server": server, "bridle_tasks": tasks}
        rollout = Settings(prompt_length=16, response_length=16, custom=custom)
        actor = SimpleNamespace(rollout=rollout)
        config = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=actor))
        self.loop = BridleAgentLoop(config)

    def played(self, step, names):
        async def run(name):
            outputs = await self.loop.run({}, extra_info={"task_id": name}, global_steps=step + 1)
            return outputs[0].extra_fields["bridle_session"]

        async def run_all():
            async with asyncio.TaskGroup() as group:
                wanted = [name for name in names for _ in range(SAMPLES)]
                running = [group.create_task(run(name)) for name in wanted]
            return [one.result() for one in running]

        found = iter(asyncio.run(run_all()))
        return [[next(found) for _ in range(SAMPLES)] for _ in names]


class Settings(dict):
    """Settings with attributes, like OmegaConf's."""

    __getattr__ = dict.__getitem__


TRAINERS = {
    "slime": Slime,
    "slime-async": SlimeAsync,
    "nemo-rl": NemoRl,
    "nemo-gym": NemoGym,
    "verl": Verl,
}


def names_of(tasks):
    return [json.loads(line)["task_id"] for line in Path(tasks).read_text().splitlines()]


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(trainer, path, steps):
    state: dict = json.loads(path.read_text()) if path.exists() else {"next": 0, "trained": []}
    if "data" in state:
        trainer.load(state["data"])

    def take(step):
        say(f"take {step}")
        return trainer.take(step)

    following = take(state["next"]) if trainer.ahead else []
    for step in range(state["next"], steps):
        taken = following if trainer.ahead else take(step)
        if trainer.ahead and step + 1 < steps:
            following = take(step + 1)
        say(f"train {step}")
        state["trained"] += taken
        state |= {"next": step + 1, "data": trainer.state()}
        path.with_suffix(".new").write_text(json.dumps(state))
        path.with_suffix(".new").rename(path)
        say(f"saved {step}")


if __name__ == "__main__":
    name, server, tasks, checkpoint, steps = sys.argv[1:]
    main(TRAINERS[name](server, tasks), Path(checkpoint), int(steps))
