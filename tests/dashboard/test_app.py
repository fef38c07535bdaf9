"""Pages: each answers, everything of others is escaped, nothing is loaded from elsewhere."""

import asyncio
import re
from html.parser import HTMLParser

import pytest
from tests.capture.made import MadeSession
from tests.dashboard.house import HOSTILE, busy, client, long, looked_at, steps, write

from bridle.dashboard import app as pages
from bridle.dashboard.session import PAGE
from bridle.scripted.script import make_script


class Page(HTMLParser):
    """Collector of all that a browser would load, run and follow."""

    def __init__(self, html):
        super().__init__()
        self.scripts, self.loads, self.links, self.inline, self.text = [], [], [], [], []
        self._in_script = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        self._in_script = tag == "script"
        if tag == "script":
            self.scripts.append(given.get("src"))
        if tag in ("img", "iframe", "object", "embed", "source") or (
            tag == "link" and given.get("rel") != "icon"
        ):
            self.loads.append(given.get("src") or given.get("href") or given.get("data"))
        if tag == "a":
            self.links.append(given.get("href"))

    def handle_data(self, text):
        (self.inline if self._in_script else self.text).append(text)

    def handle_endtag(self, tag):
        self._in_script = False


def links_to(what, html):
    return [link for link in Page(html).links if f"/{what}/" in link]


def every_page(browser, start="/"):
    """All pages that are reached by links, by path and query."""
    found, waiting = {}, [start]
    while waiting:
        at = waiting.pop()
        if at in found or "/static/" in at or at.startswith("#") or at.endswith("/file/escape"):
            continue
        found[at] = browser.get(at)
        if found[at].headers["content-type"].startswith("text/html"):
            waiting += [link for link in Page(found[at].text).links if link]
    return found


@pytest.fixture(scope="module")
def found(run):
    """Every page of the run."""
    with client(run) as browser:
        return every_page(browser)


def test_every_linked_page_answers_200(found):
    assert {answer.status_code for answer in found.values()} == {200}
    kinds = {re.sub(r"[0-9a-f]{24}|one\.\d|\d+", "*", at.partition("?")[0]) for at in found}
    assert {
        *("/", "/sessions", "/tasks", "/task", "/session/*", "/session/*/exchange/*"),
        *("/session/*/exchange/*/request.json", "/session/*/exchange/*/reply.json"),
        *("/session/*/trace/*", "/session/*/trace/*/messages", "/session/*/file/stdout"),
    } <= kinds


def test_hostile_text_is_escaped_and_every_page_has_a_strict_csp(found):
    shown = 0
    for at, answer in found.items():
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["referrer-policy"] == "same-origin"
        if not answer.headers["content-type"].startswith("text/html"):
            assert answer.headers["content-type"].startswith("text/plain"), at
            assert "sandbox" in answer.headers["content-security-policy"], at
            continue
        page = Page(answer.text)
        own = [*page.scripts, *page.loads]
        assert all(one.startswith("/static/") for one in own), at
        assert page.inline == [], at
        assert "<script>alert" not in answer.text
        assert all(link.startswith(("/", "#")) for link in page.links), at
        shown += "<script>alert" in " ".join(page.text)
    assert shown > 10


def test_session_page_shows_roots_turns_counts_and_the_escaped_error(run):
    with client(run) as browser:
        page = browser.get("/session/one.0").text
        failed = browser.get("/session/one.2").text

    assert "captured" in page
    assert "mini_swe_agent" in page
    assert "root: <b>first</b>" in page
    assert "root: <b>tools_changed</b>" in page
    assert "does not contain" in page
    assert page.count('class="turn') == 5
    assert "it broke &lt;script&gt;" in failed


def test_a_session_is_downloaded_as_trajectory_and_as_replay_script(run):
    with client(run) as browser:
        page = Page(browser.get("/session/one.0").text)
        trajectory = browser.get("/session/one.0/trajectory.json").json()
        script = make_script(browser.get("/session/one.0/script.json").json(), "the download")
        other = browser.get("/session/one.0/other.json").status_code

    assert {"/session/one.0/trajectory.json", "/session/one.0/script.json"} <= {*page.links}
    assert "/session/one.0/trace/0/messages" in page.links
    assert trajectory["session_id"] == "one.0"
    assert [len(one.turns) for one in script.conversations] == [3, 3, 1]
    assert other == 404


@pytest.mark.parametrize("path", ["/", "/session/one.0"])
def test_pages_list_turns_shown_before_the_token_balance(run, path):
    with client(run) as browser:
        reported = " ".join(Page(browser.get(path).text).text)
    order = ["turns shown", "verbatim", "rerendered", "merge ratio", "captured"]
    assert sorted(order, key=reported.index) == order
    assert "sampled tokens rendered as other ids" in reported


def test_an_exchange_page_includes_the_tree_except_for_htmx_requests(run):
    with client(run) as browser:
        link = links_to("exchange", browser.get("/session/one.0").text)[0]
        whole = browser.get(link).text
        alone = browser.get(link, headers={"HX-Request": "true", "HX-Target": "exchange"})
        request = browser.get(link + "/request.json")

    assert 'class="tree"' in whole
    assert 'aria-current="true"' in whole
    assert alone.text.lstrip().startswith('<article id="exchange"')
    assert alone.headers["vary"] == "HX-Target"
    assert "You fix tests." in alone.text
    assert "Look first." in alone.text
    assert request.json()["messages"][0]["content"] == "You fix tests."
    assert request.json()["messages"][1]["content"].endswith(HOSTILE)


def test_exchange_page_explains_why_a_fork_does_not_extend_the_previous_turn(run):
    with client(run) as browser:
        page = browser.get("/session/one.0").text
        _, _, after = page.partition("root: <b>tools_changed</b>")
        fork = browser.get(re.findall(r'class="turn.*?href="([^"]+)"', after)[0]).text

    assert "why the prompt does not extend the previous turn" in fork
    assert "they part at position" in fork


def test_a_session_of_10000_exchanges_is_read_once_and_paginated(tmp_path):
    asyncio.run(write(tmp_path, long(10_000, chain=100)))
    with client(tmp_path) as browser:
        first = browser.get("/session/long")
        last = browser.get("/session/long?at=9900")
        one = browser.get("/session/long/exchange/x5000", headers={"HX-Target": "exchange"})

    assert first.text.count('class="turn') == pages.TREE
    assert last.text.count('class="turn') == 100
    assert "x5000" in one.text
    assert len(first.content) < 400_000
    assert len(one.content) < 100_000
    assert [made.reads for made in browser.source._runs.values()] == [1]


def test_exchange_link_shows_the_tree_page_that_contains_the_exchange(tmp_path):
    asyncio.run(write(tmp_path, long(700)))
    with client(tmp_path) as browser:
        page = browser.get("/session/long/exchange/x650").text

    assert 'id="x-x650"' in page
    assert 'id="x-x1"' not in page


def test_a_trace_of_100000_tokens_is_shown_in_pages_of_1000(tmp_path):
    asyncio.run(write(tmp_path, long(20, new=4000, output=1000)))
    with client(tmp_path) as browser:
        first = browser.get("/session/long/trace/0").text
        last = browser.get("/session/long/trace/0?at=99000").text
        beyond = browser.get("/session/long/trace/0?at=99999999999").text

    assert first.count("· prompt: before") == PAGE
    assert 'rel="next"' in first
    assert last.count("trained, logprob") == 1000
    assert 'rel="next"' not in last
    assert 'class="tokens' in beyond
    assert len(first.encode()) < 300_000


def test_an_unknown_path_or_id_gets_a_404_page(run):
    with client(run) as browser:
        answers = [
            browser.get(path)
            for path in (
                *("/nothing", "/session/none", "/session/one.0/exchange/none", "/task?id=none"),
                *("/session/one.0/trace/99", "/session/one.0/trace/99/messages"),
                *("/session/one.0/file/escape", "/session/one.0/file/secret"),
                "/session/one.0/exchange/x/reply.json",
            )
        ]
        posted = browser.post("/")

    assert {answer.status_code for answer in answers} == {404}
    assert all("Bridle</a>" in answer.text for answer in answers)
    assert posted.status_code == 405


def test_an_invalid_page_offset_answers_200(run):
    with client(run) as browser:
        for at in ("-1", "x", "1e9", "٣", "9" * 40):
            assert browser.get("/sessions", params={"at": at}).status_code == 200


def test_session_tree_shows_kinds_branches_and_exclusion_reasons(tmp_path):
    asyncio.run(write(tmp_path, busy()))
    with client(tmp_path) as browser:
        page = browser.get("/session/busy").text

    for text in ("subagent", "compaction", "side", "no delivery record", "length"):
        assert text in page
    assert 'class="root d0"' in page
    assert 'class="d1"' in page
    assert "it is running, or its process was killed" in page


def test_rejected_replies_are_marked_on_the_session_page_and_their_share_on_the_overview(tmp_path):
    made = MadeSession("votes")
    first = made.call(None, output=6, extra={"question": "q"})
    made.call(None, new=first.suffix_ids, output=6, extra={"question": "q"})
    made.end()
    asyncio.run(write(tmp_path, made))
    with client(tmp_path) as browser:
        session, overview = browser.get("/session/votes").text, browser.get("/").text

    assert session.count('<span class="why">rejected</span>') == 2  # the call and its trace
    assert re.search(r"rejected replies <b>50\.0 %</b>.*COMPLETED sessions", overview)


def test_links_of_a_mounted_dashboard_stay_below_the_mount_path(run):
    from starlette.applications import Starlette
    from starlette.routing import Mount
    from starlette.testclient import TestClient

    from bridle.dashboard.app import make_app

    with TestClient(Starlette(routes=[Mount("/ui", make_app(looked_at(run)))])) as browser:
        found = every_page(browser, "/ui/")

    assert len(found) > 20
    assert {answer.status_code for answer in found.values()} == {200}
    assert all(at.startswith("/ui/") for at in found)


def test_lone_surrogates_of_a_harness_do_not_break_a_page(tmp_path):
    made = busy("odd")
    made.end(0.0, status="ERROR", cause="harness_crash", error="bad \udcff byte")
    asyncio.run(write(tmp_path, made))
    with client(tmp_path) as browser:
        page = browser.get("/session/odd")

    assert page.status_code == 200


@pytest.mark.parametrize("status", ["failed", "COMPLETED"])
def test_session_list_is_filtered_by_query_parameters(run, status):
    with client(run) as browser:
        page = browser.get("/sessions", params={"status": status}).text

    assert ("/session/one.2" in page) is (status == "failed")
    assert ("/session/one.0" in page) is (status == "COMPLETED")


def test_session_list_is_sorted_by_query_parameter_and_keeps_its_filters(run):
    with client(run) as browser:
        page = browser.get("/sessions", params={"sort": "-reward", "text": "one"}).text

    rows = re.findall(r'data-row href="/session/(one\.\d)', page)
    assert rows == ["one.0", "one.1", "one.2"]
    assert 'aria-sort="descending"' in page
    assert "/sessions?text=one&amp;sort=reward" in page


def test_comparison_page_shows_the_differences_of_two_samples_of_a_group(run):
    with client(run) as browser:
        task = browser.get("/task?id=one&run=.").text
        page = browser.get("/compare?id=one&a=one.0&b=one.2").text
        missing = browser.get("/compare?id=one&a=one.0&b=none")

    assert "/compare?id=one&amp;run=.&amp;a=one.0&amp;b=one.1" in task
    assert re.search(r'class="differs"><th scope="row">reward<', page)
    assert "evaluator" in page
    assert "messages are equal" in page
    assert missing.status_code == 404


def test_comparison_page_shows_the_statistics_of_two_training_steps(tmp_path):
    steps(tmp_path)
    with client(tmp_path) as browser:
        page = browser.get("/compare-runs?a=.&va=3&b=.&vb=4").text

    facts = re.findall(r'<th scope="row">([^<]+)</th><td>(.*?)</td><td>(.*?)</td>', page)
    shown = {name: (one, two) for name, one, two in facts}
    assert shown["sessions"] == ("3", "1")
    assert shown["scored"] == ("2", "1")
    assert shown["mean reward"] == ("0.5", "1")
    assert "1 timeout" in shown["failures"][0]
    assert shown["failures"][1] == "none"
    assert shown["turns"] == ("1", "1")
    assert shown["sampled tokens"] == ("6", "6")
    assert "The task that differs most: task-1" in page
    assert "2 equal messages, then:" in page
    assert re.findall(r'<option value="(\d)" selected', page) == ["3", "4"]


def test_comparison_page_shows_two_runs_and_names_an_unknown_run(tmp_path):
    steps(tmp_path / "one")
    asyncio.run(write(tmp_path / "two", long(2)))
    with client(tmp_path) as browser:
        overview = browser.get("/").text
        page = browser.get("/compare-runs?a=one&b=two").text
        missing = browser.get("/compare-runs?a=one&b=three")

    assert "/compare-runs?a=one&amp;b=two" in overview
    assert '<th scope="row">sessions</th><td>4</td><td>1</td>' in page
    assert missing.status_code == 404
    assert "three" in missing.text


def test_comparison_page_marks_the_first_different_message_of_two_samples(tmp_path):
    one, two = MadeSession("one"), MadeSession("two")
    for made, reply in ((one, "left"), (two, "right")):
        made.call(None, exchange_id=reply, output=6)
        made.end(1.0)
    asyncio.run(write(tmp_path, one, two))
    with client(tmp_path) as browser:
        page = browser.get("/compare?id=task-1&a=one&b=two").text

    assert "2 equal messages, then:" in page
    assert page.count("<mark>") == 2
