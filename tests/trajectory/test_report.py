"""The one page that says whether a batch's data is right."""

from tests.capture.made import MadeSession
from tests.trajectory.test_init import a_hard_session

from bridle.trajectory import rebuild
from bridle.trajectory.scores import LINES_OF_FORKS, Report, report_of
from bridle.types import Kind


def a_session(number):
    """Four calls: a turn, its extension, a fork with a reason, a side call."""
    made = MadeSession(f"s{number}", seed=number)
    made.call(output=6)
    made.call("x0", output=6)
    made.call(None, continues="x1", root_reason="tools_changed", output=6)
    made.call(None, continues=None, kind=Kind.SIDE, output=2)
    made.end()
    return f"s{number}", "pi", "COMPLETED", rebuild(made.capture()).metadata["stats"]


def test_the_report_of_a_correct_batch_shows_its_counts_and_that_both_laws_hold():
    lines = list(report_of(a_session(number) for number in range(4)).lines())
    text = "\n".join(lines)
    assert "sessions  4 (4 COMPLETED)" in text
    assert "law 1     holds" in text
    assert "law 2     holds: captured 80 = trained 72 + excluded 8" in text
    assert "excluded  10.0 % of sampled tokens" in text
    assert "kind                    8  10.0 %" in text
    assert "! turns     12 shown: 4 verbatim (33.3 %), 8 rerendered (40 tokens), 0 foreign" in text
    assert "! merge ratio  0.500 (4 of 8 agent calls" in text
    assert "drift     8 exact" in text
    assert "pi                 tools_changed               4" in text
    assert len(lines) < 40


def test_the_report_as_json_has_every_count():
    assert report_of([a_session(0)]).as_json() == {
        "sessions": 1,
        "statuses": {"COMPLETED": 1},
        "exchanges": 4,
        "traces": 2,
        "tokens_captured": 20,
        "tokens_trained": 18,
        "tokens_excluded": {"kind": 2},
        "law_1_unproved": {},
        "law_2_unequal": [],
        "turns_shown": 3,
        "turns_verbatim": 1,
        "turns_rerendered": 2,
        "turns_foreign": 0,
        "turns_given": 0,
        "tokens_rerendered": 10,
        "sessions_uncounted": 0,
        "merge_ratio": 0.5,
        "forks": [{"harness": "pi", "reason": "tools_changed", "count": 1}],
        "drift": {"exact": 2},
        "tokens_spliced": 0,
        "overlong_traces": 0,
        "truncated_sessions": {},
        "unknown": {},
        "unenforced": {},
        "rejected": [{"harness": "pi", "status": "COMPLETED", "tokens": 0, "of": 20}],
        "malformed_calls": [],
        "untrained_sessions": [],
    }


def test_rejected_replies_are_reported_by_harness_and_status():
    name, _, _, stats = a_session(0)
    stats = stats | {"rejected": {"exchanges": 1, "tokens": 5}}
    report = report_of([(name, "pi", "ERROR", stats), a_session(1)])
    assert "rejected  25.0 % of what pi sampled in ERROR sessions" in list(report.lines())
    assert [(one["status"], one["tokens"], one["of"]) for one in report.as_json()["rejected"]] == [
        ("COMPLETED", 0, 20),
        ("ERROR", 5, 20),
    ]


def test_unknown_and_unenforced_request_fields_are_reported_with_counts():
    name, _, _, stats = a_session(0)
    without = {"unknown": {"mood": 1}, "unenforced": {"logit_bias": 2, "min_p": 1}}
    report = report_of([(name, "pi", "COMPLETED", stats | without), a_session(1)])
    assert "! unknown to the gateway, not acted on: 1 mood" in report.lines()
    assert "asked for and not enforced: 2 logit_bias, 1 min_p" in report.lines()
    assert report.as_json()["unenforced"] == without["unenforced"]


def test_malformed_tool_calls_are_counted_by_harness_and_status():
    name, _, _, stats = a_session(0)
    report = report_of([(name, "pi", "ERROR", stats | {"malformed_calls": 3}), a_session(1)])
    assert "malformed 3 tool calls of pi in ERROR sessions" in list(report.lines())
    assert report.as_json()["malformed_calls"] == [{"harness": "pi", "status": "ERROR", "calls": 3}]


def test_faults_of_a_batch_are_marked_with_an_exclamation_mark():
    _, harness, status, stats = a_session(0)
    stats |= {
        "tokens_trained": 0,
        "breaks": [{"exchange": "x", "position": 0, "reason": "digest_mismatch"}],
        "spliced": {"spans": 1, "tokens": 3},
        "overlong": 2,
        "truncated": "timeout",
    }
    several = [(f"s{n}", harness, status, stats) for n in range(4)]
    marked = [line for line in report_of(several).lines() if line.startswith("!")]
    assert marked == [
        "! turns     12 shown: 4 verbatim (33.3 %), 8 rerendered (40 tokens), 0 foreign; 0 given",
        "! merge ratio  0.500 (4 of 8 agent calls that show a sampled turn extend its ids)",
        "! law 1   4 calls are not proved: 4 digest_mismatch",
        "! law 2   DOES NOT HOLD in s0, s1, s2: captured 80 = trained 0 + excluded 8",
        "! nothing trains in 4 sessions: s0, s1, s2, ...",
    ]
    text = "\n".join(report_of(several).lines())
    assert "but for 12 tokens in spans that were spliced" in text
    assert "overlong  8 traces" in text
    assert "cut       4 sessions (4 timeout)" in text


def test_statistics_of_version_1_show_a_dash_for_missing_counts():
    session_id, harness, status, stats = a_session(0)
    lacking = {name: n for name, n in stats.items() if not name.startswith(("turns", "merging"))}
    lacking.pop("stats_version")
    report = report_of([(session_id, harness, status, lacking)])
    assert "turns     - in 1 sessions, which were not counted when captured" in report.lines()
    assert (report.as_json()["turns_shown"], report.merge_ratio) == (None, None)


def test_a_report_of_many_fork_reasons_lists_some_and_counts_the_rest():
    report = Report()
    for number in range(100):
        report.forks["pi", f"reason{number}"] = number + 1
    lines = list(report.lines())
    assert len(lines) < LINES_OF_FORKS + 15
    assert "88 other kinds" in "\n".join(lines)


def test_the_report_of_no_sessions_has_zero_counts():
    assert "law 2     holds: captured 0 = trained 0 + excluded 0" in list(report_of([]).lines())


def test_the_report_of_a_session_with_forks_and_retries_finds_no_fault():
    made, lost = a_hard_session()
    stats = rebuild(made.capture()).metadata["stats"]
    report = report_of([("s1", "pi", "COMPLETED", stats)])
    assert (report.unequal, report.unproved, report.untrained) == ([], {}, [])
    assert report.excluded == {"abandoned": sum(lost.values())}
    assert report.forks == {("pi", "history_changed"): 2}
