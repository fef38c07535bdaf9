"""The order in which slime's `train_async.py` calls its rollout manager, in a process of its own.

    python slime_loop.py SERVER TASKS CHECKPOINT ROLLOUTS

The next rollout begins before the training of this one; a checkpoint has what was trained and the
state of the data source. Says a line before and after each.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.bridges.samples import Sample

from bridle.bridges.slime import generate_rollout_async


class Source:
    """Groups of two samples over the tasks, as slime's data source gives them."""

    def __init__(self, names):
        self.names, self.given, self.metadata = names, 0, {}

    def get_samples(self, count):
        numbers = range(self.given, self.given + count)
        self.given += count
        return [[self.sample(number, at) for at in range(2)] for number in numbers]

    def sample(self, number, at):
        task = {"task_id": self.names[number % len(self.names)]}
        return Sample(group_index=number, index=2 * number + at, metadata=task)


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(server, tasks, checkpoint, rollouts):
    path = Path(checkpoint)
    state: dict = json.loads(path.read_text()) if path.exists() else {"next": 0, "trained": []}
    lines = Path(tasks).read_text().splitlines()
    source = Source([json.loads(line)["task_id"] for line in lines])
    source.given, source.metadata = state.get("source", (0, {}))
    args = SimpleNamespace(
        bridle_server=server, bridle_tasks=tasks, bridle_run="one", rollout_batch_size=2
    )

    def generate(rollout):
        say(f"generate {rollout}")
        groups = generate_rollout_async(args, rollout, source)
        return [of[0][0].group_index for of in groups]

    following = generate(state["next"])
    for rollout in range(state["next"], rollouts):
        taken = following
        if rollout + 1 < rollouts:
            following = generate(rollout + 1)
        say(f"train {rollout}")
        state["trained"] += taken
        state |= {"next": rollout + 1, "source": (source.given, source.metadata)}
        path.with_suffix(".new").write_text(json.dumps(state))
        path.with_suffix(".new").rename(path)
        say(f"saved {rollout}")


if __name__ == "__main__":
    server, tasks, checkpoint, rollouts = sys.argv[1:]
    main(server, tasks, checkpoint, int(rollouts))
