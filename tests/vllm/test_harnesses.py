"""Real, unmodified harnesses on a real vLLM, whose tokens are scripted and nothing else."""

import pytest

from bridle.capture.sqlite import SqliteReader
from bridle.cli.batch import Batch, run_batch
from bridle.config import Task

from .checks import check_session

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

COMMANDS = (
    "ls -la",
    "printf 'alpha\\nbeta\\ngamma\\n' > words.txt",
    "wc -l words.txt",
    "grep -n beta words.txt",
    "sed -i 's/beta/delta/' words.txt",
    "cat words.txt",
    "python3 -c 'print(\"né\", 6 * 7)' > number.txt",
    "cat number.txt words.txt",
)
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
HARNESSES = {
    "pi": {},
    "mini_swe_agent": {},
    "claude_code": {"settings": {"bare": True}},
}


def instruction(harness):
    return f"Write the words into words.txt and mend them, as the {harness} does."


def script():
    """Every harness does the same job, and ends in its own way."""
    steps = [
        {"reasoning": f"Step {number}.", "content": f"Now: {number}.", "shell": [command]}
        for number, command in enumerate(COMMANDS, 1)
    ]
    done = {"content": "The words are mended."}
    endings = {"mini_swe_agent": [{"content": "Done.", "shell": [SUBMIT]}]}
    return {
        "conversations": [
            {
                "when": {"user_contains": instruction(name)},
                "turns": [*steps, *endings.get(name, ()), done],
            }
            for name in HARNESSES
        ]
    }


def task(name, fields):
    command = "grep -q delta words.txt && grep -q 42 number.txt"
    return Task.model_validate(
        {
            "task_id": name,
            "instruction": instruction(name),
            "agent": {"harness": name, **fields},
            "evaluator": {"strategy": "command", "config": {"command": command}},
        }
    )


def test_three_real_harnesses_train_on_the_engines_own_tokens(server, tmp_path):
    server.say(script())
    folder = tmp_path / "run"
    tasks = [task(name, fields) for name, fields in HARNESSES.items()]
    engine = f"tests.vllm.checks:RecordingVllm:{server.url}"

    lines = run_batch(Batch(tasks, engine, str(server.model), folder, concurrency=3))

    assert [line["harness"] for line in lines] == list(HARNESSES)
    for line in lines:
        assert (line["status"], line["reward"]) == ("COMPLETED", 1.0), line
        assert line["merge_ratio"] == 1.0, line
    with SqliteReader(folder / "capture.sqlite") as store:
        for line in lines:
            trajectory = check_session(store, line["session_id"], server.model)
            stats = trajectory.metadata["stats"]
            assert stats["exchanges"] >= len(COMMANDS) + 1
            assert set(stats["drift"]) == {"exact"}
