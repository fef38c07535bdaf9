import pytest

from bridle.config import Task
from bridle.datasets.jsonl import with_template
from bridle.errors import ConfigError

TASK = Task(task_id="t-1", instruction="Fix {{ task_id }} in {x}", metadata={"repo": "org/a"})


def test_template_placeholders_are_filled_once_and_inserted_text_is_not_expanded():
    text = "Repository {{metadata.repo}} ({{ task_id }}).\n{{ instruction }}\nKeep {braces}."
    filled = with_template(TASK, text)
    assert filled.instruction == (
        "Repository org/a (t-1).\nFix {{ task_id }} in {x}\nKeep {braces}."
    )
    assert filled.task_id == TASK.task_id


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nothing", "must contain {{ instruction }}"),
        ("{{ instruction }} {{ metadata.gone }}", r"wants \['metadata\.gone'\]; known: "),
    ],
)
def test_a_template_without_instruction_or_with_an_unknown_placeholder_is_refused(text, why):
    with pytest.raises(ConfigError, match=why):
        with_template(TASK, text)
