"""Lookup tasks are fresh for a fresh seed, and their demonstrator is weak on purpose."""

from examples.demo.lookups import lookups, weak_script, write_files


def test_lookup_tasks_are_determined_by_the_seed():
    first = list(lookups(20, seed=1))

    assert first == list(lookups(20, seed=1))
    assert first != list(lookups(20, seed=2))


def test_the_answer_of_a_lookup_task_is_the_number_in_its_file(tmp_path):
    for task in lookups(10, seed=3):
        write_files(task, tmp_path / task.task_id)

        assert (tmp_path / task.task_id / task.thing).read_text() == task.answer
        assert f'"{task.thing}"' in task.instruction


def test_no_lookup_instruction_is_a_substring_of_another():
    texts = [task.instruction for task in lookups(120, seed=4)]

    assert not any(a in b for a in texts for b in texts if a is not b)


def test_the_lookup_demonstrator_is_right_about_one_time_in_seven():
    tasks = list(lookups(2000, seed=5))
    conversations = weak_script(tasks, seed=5)["conversations"]
    right = sum(
        c["turns"][-1]["content"] == t.answer for c, t in zip(conversations, tasks, strict=True)
    )
    gave_up = sum(len(c["turns"]) == 1 for c in conversations)

    assert 0.10 < right / len(tasks) < 0.22
    assert 0.35 < gave_up / len(tasks) < 0.45
