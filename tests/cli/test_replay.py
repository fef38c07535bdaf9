"""A captured session as a script: the same ids again."""

from bridle.cli.captured import sessions
from bridle.cli.show import script_of
from bridle.scripted.script import make_script


def test_a_replayed_session_has_the_exact_sampled_ids_in_order(finished_run):
    capture = next(sessions(finished_run))

    script = script_of(capture)

    [conversation] = script["conversations"]
    assert [turn["token_ids"] for turn in conversation["turns"]] == [
        exchange.output_ids.tolist() for exchange in capture.exchanges
    ]
    assert conversation["when"]["user_contains"][0].endswith("hold?")
    assert len(make_script(script, "replay").conversations[0].turns) == 2
