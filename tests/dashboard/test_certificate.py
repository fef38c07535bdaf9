"""The page of a run's certificate: what `bridle certify` wrote, and nothing where it wrote none."""

import json
import re

import pytest
from tests.dashboard.house import HOSTILE, certified, client
from tests.dashboard.test_app import Page, every_page

from bridle.dashboard.source import CERTIFIED


def write(folder, **changes):
    content = certified("models/policy") | changes
    (folder / "certificate.json").write_text(json.dumps(content))


def test_a_run_without_a_certificate_has_no_certificate_page(run_folder):
    with client(run_folder) as browser:
        assert "/certificate" not in browser.get("/").text
        assert browser.get("/certificate").status_code == 404
        assert (
            "no certificate by `bridle certify` for the run"
            in browser.get("/certificate?run=.").text
        )


def test_certificate_page_shows_verdict_causes_and_facts(run_folder):
    facts = [
        {"name": "temperature", "rollout": 1.0, "trainer": 0.7, "same": False},
        {"name": "dtype", "rollout": None, "trainer": "bfloat16", "same": None},
    ]
    causes = [
        {"cause": "temperature", "score": 0.97, "evidence": "logprob + entropy explains 97 %"},
        {"cause": "weights", "score": 0.31, "evidence": "large differences anywhere"},
    ]
    mismatches = [{"causes": causes, "token_share": 0.985, "kl_share": 1.0}]
    write(run_folder, facts=facts, mismatches=mismatches)
    with client(run_folder) as browser:
        overview = browser.get("/").text
        page = browser.get("/certificate?run=.").text

    reply = 'bad"><b>✗</b> <a href="/certificate?run=.">trainer and rollout disagree</a>'
    assert reply in overview
    text = " ".join(" ".join(Page(page).text).split())
    assert "trainer and rollout disagree" in text
    assert "logprob + entropy explains 97 % 98.5 % 100.0 % 0.97 1 weights large" in text
    assert "0.4 of 0.0002 tolerated" in text
    assert re.findall(r'<tr (.*?)><th scope="row">(\w+)<', page) == [
        ('class="differs"', "temperature"),
        ("", "dtype"),
    ]


def test_certificate_page_lists_turns_by_kl_share_in_pages_with_links_to_exchanges(run_folder):
    [turn] = certified("x")["turns"]
    turns = [turn | {"exchange_id": f"x{n}", "kl_share": n / 1e5} for n in range(150)]
    write(run_folder, turns=turns)
    with client(run_folder) as browser:
        pages = [browser.get("/certificate", params={"at": at}).text for at in ("", "100", "900")]

    listed = [re.findall(r"/session/one.0/exchange/x(\d+)", page) for page in pages]
    assert [len(one) for one in listed] == [100, 50, 0]
    assert [int(one) for one in listed[0] + listed[1]] == [*range(149, -1, -1)]
    assert 'rel="next"' in pages[0]


def test_overview_shows_a_rewritten_certificate(run_folder):
    write(run_folder, faithful=True, mismatches=[])
    with client(run_folder) as browser:
        assert "trainer and rollout agree" in browser.get("/").text
        assert "<h2>Causes" not in browser.get("/certificate").text
        write(run_folder)
        assert "trainer and rollout disagree" in browser.get("/").text


def test_hostile_text_in_a_certificate_is_escaped(run_folder):
    (run_folder / "certificate.json").write_text(json.dumps(certified(HOSTILE)))
    with client(run_folder) as browser:
        found = every_page(browser, "/certificate")
        answer = found["/certificate"]
    page = Page(answer.text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert page.inline == []
    assert "<script>alert" not in answer.text
    assert " ".join(page.text).count("<script>alert") >= 7
    assert all(link.startswith(("/", "#")) for link in page.links)


@pytest.mark.parametrize(
    "change",
    [{"turns": 3}, {"faithful": None}, {"tokens": "many"}, {"mismatches": [{"causes": "none"}]}],
)
def test_a_malformed_certificate_is_read_as_none(change):
    good = certified("x")
    assert CERTIFIED.read(good) is not None
    assert CERTIFIED.read(good | change) is None
    assert CERTIFIED.read({}) is None
