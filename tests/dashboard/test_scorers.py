"""The page of several scorers on one run, from the file that `bridle score` wrote."""

import json
import re

import pytest
from tests.dashboard.house import HOSTILE, client
from tests.dashboard.test_app import Page


def compared(name="judge.toml", count=1):
    """The file's content; the last session is the same to both."""
    sessions = [
        {
            "session_id": f"one.{n}",
            "task_id": name,
            "rewards": {"recorded": 1.0, name: None if n == 0 else n / count},
            "errors": {name: name} if n == 0 else {},
        }
        for n in range(count + 1)
    ]
    pairs = [
        {"scorers": ["recorded", name], "compared": count, "differing": count - 1,
         "difference": 0.25}
    ]  # fmt: skip
    return {"made_at": 1.7e9, "scorers": ["recorded", name], "sessions": sessions, "pairs": pairs}


def test_scorer_page_shows_pairs_and_sessions_and_is_linked_from_the_overview(run_folder):
    (run_folder / "scorers.json").write_text(json.dumps(compared(count=150)))
    with client(run_folder) as browser:
        overview = browser.get("/").text
        pages = [browser.get(f"/scorers?run=.&at={at}").text for at in (0, 100)]

    assert 'href="/scorers?run=.">scorers differ on 149 of 151 sessions' in overview
    text = " ".join(" ".join(Page(pages[0]).text).split())
    assert "149 of 151 sessions scored differently" in text
    assert "recorded and judge.toml 149 150 0.25" in text
    listed = [re.findall(r'href="/session/one\.(\d+)"', page) for page in pages]
    assert [len(one) for one in listed] == [100, 51]


def test_hostile_scorer_names_and_errors_are_escaped(run_folder):
    (run_folder / "scorers.json").write_text(json.dumps(compared(HOSTILE)))
    with client(run_folder) as browser:
        page = browser.get("/scorers").text

    assert "<script>alert" not in page
    assert Page(page).inline == []
    assert HOSTILE in "".join(Page(page).text)


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps(compared() | {"pairs": [1]})])
def test_a_run_without_a_readable_scorer_comparison_has_no_scorer_page(run_folder, content):
    (run_folder / "scorers.json").write_text(content)
    with client(run_folder) as browser:
        assert "/scorers" not in browser.get("/").text
        assert browser.get("/scorers?run=.").status_code == 404
