import sys
from contextlib import asynccontextmanager

import pytest
from tests.evaluators.made import LEAVE, evaluation, watching

from bridle.errors import ConfigError, EvaluatorError
from bridle.evaluators.base import Unscorable
from bridle.evaluators.patch import TestOnOutput, filter_patch, from_junit
from bridle.evaluators.summary import all_passed, from_summary

BEGIN = (
    "git init -q . && git config user.name a && git config user.email a@b && echo 1 > code.txt"
    " && printf 'a\\0b' > blob && mkdir -p tests && echo strict > tests/rule.txt"
    " && git add -A && git commit -q --allow-empty -m $RANDOM$RANDOM"
)
"""Two runtimes begin with the same files and different commits."""

RUN = """echo '=========== short test summary info ==========='
fail=0
check() { if eval "$2"; then echo "PASSED $1"; else echo "FAILED $1 - no"; fail=1; fi; }
check t::new 'grep -q 2 code.txt'
check t::old 'grep -q strict tests/rule.txt'
echo '===== 2 tests in 0.01s ====='
exit $fail"""


@asynccontextmanager
async def two_runtimes(folder, work, begin=BEGIN, **more):
    """A context whose fresh runtime is untouched and whose session did `work`."""
    async with evaluation(folder, prepare=begin, **more) as context:
        assert (await context.places.agents.exec(work)).ok
        yield context


async def found(folder, work, **config):
    named = {"command": RUN, "fail_to_pass": ["t::new"], "pass_to_pass": ["t::old"]}
    async with two_runtimes(folder, work) as context:
        return await TestOnOutput.from_config({**named, **config}).evaluate(context)


@pytest.mark.parametrize(
    ("work", "reward", "changed"),
    [
        ("echo 2 > code.txt", 1.0, ["code.txt"]),
        ("echo 2 > code.txt; git commit -qam mine", 1.0, ["code.txt"]),
        ("echo 2 > code.txt; git init -q new; echo 1 > new/x", 1.0, ["code.txt", "new/x"]),
        ("true", 0.0, []),
        ("echo 2 > code.txt; rm tests/rule.txt", 0.0, ["code.txt", "tests/rule.txt"]),
        ("echo 2 > code.txt; printf 'c\\0d' > blob; echo n > 'new file'", 1.0,
         ["blob", "code.txt", "new file"]),
    ],
)  # fmt: skip
async def test_changes_of_the_agent_are_tested_in_a_fresh_runtime(tmp_path, work, reward, changed):
    evaluated = await found(tmp_path, work)
    assert evaluated.reward == reward
    assert evaluated.metadata["changed"] == changed


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("PASSED a", 1.0),
        ("noise; PASSED a", 1.0),
        ("PASSED a; FAILED b", 0.0),
        ("FAILED a", 0.0),
        ("PASSED a; FAILED a", 0.0),
        ("nothing", 0.0),
        ("PASSED a; exit 3", 0.0),
    ],
)
async def test_reward_is_1_only_if_the_output_names_exactly_the_expected_statuses(
    tmp_path, said, reward
):
    """The form of Polar's `expected_output_json`."""
    lines = [word if word.startswith("exit") else f"echo {word}" for word in said.split("; ")]
    async with two_runtimes(tmp_path, "echo 2 > code.txt") as context:
        config = {"command": "; ".join(lines), "expected": {"a": "PASSED"}}
        assert (await TestOnOutput.from_config(config).evaluate(context)).reward == reward


async def test_a_run_with_an_expected_failure_may_end_with_an_error_code(tmp_path):
    async with two_runtimes(tmp_path, "true") as context:
        command = "echo PASSED a; echo FAILED b; exit 1"
        config = {"command": command, "expected": {"a": "PASSED", "b": "FAILED"}}
        assert (await TestOnOutput.from_config(config).evaluate(context)).reward == 1.0


async def test_tests_run_with_the_environment_of_the_evaluator(tmp_path):
    async with two_runtimes(tmp_path, "true", env={"SAYS": "PASSED"}) as context:
        config = {"command": "echo $SAYS a", "expected": {"a": "PASSED"}}
        assert (await TestOnOutput.from_config(config).evaluate(context)).reward == 1.0


async def test_changes_of_the_image_itself_are_no_part_of_the_patch(tmp_path):
    """They are in both runtimes before the session, and in no commit."""
    begin = f"{BEGIN}; echo 3 >> tests/rule.txt; echo built > module.so"
    command = f"git diff --cached --name-only; ls -A ~; {RUN}"
    async with two_runtimes(tmp_path, "echo 2 > code.txt", begin) as context:
        config = {"command": command, "fail_to_pass": ["t::new"], "pass_to_pass": ["t::old"]}
        evaluated = await TestOnOutput.from_config(config).evaluate(context)
    assert (evaluated.reward, evaluated.metadata["changed"]) == (1.0, ["code.txt"])
    # Neither the index nor the home holds what was taken from the agent.
    assert (tmp_path / "logs" / "evaluator.log").read_text().startswith("====")


async def test_hidden_tests_of_eval_prepare_steps_are_not_deleted_by_the_patch(tmp_path):
    hide = "echo strict > tests/hidden.txt"
    command = RUN.replace("rule.txt", "hidden.txt")
    async with two_runtimes(tmp_path, "echo 2 > code.txt", eval_prepare=hide) as context:
        config = {"command": command, "fail_to_pass": ["t::new"], "pass_to_pass": ["t::old"]}
        evaluated = await TestOnOutput.from_config(config).evaluate(context)
    assert (evaluated.reward, evaluated.metadata["changed"]) == (1.0, ["code.txt"])


async def test_config_without_fail_to_pass_or_expected_is_refused():
    with pytest.raises(ConfigError, match="either fail_to_pass or expected"):
        TestOnOutput.from_config({"command": "true"})


async def test_changes_to_excluded_test_files_are_dropped_from_the_patch(tmp_path):
    work = "echo 2 > code.txt; echo lax > tests/rule.txt; echo x > tests/helper.txt"
    evaluated = await found(tmp_path, work, exclude=["tests/*"])
    assert evaluated.reward == 1.0
    assert evaluated.metadata["dropped"] == ["tests/helper.txt", "tests/rule.txt"]


async def test_test_patch_is_applied_after_the_patch_of_the_agent(tmp_path):
    tests = (
        "diff --git a/tests/rule.txt b/tests/rule.txt\n--- a/tests/rule.txt\n+++ b/tests/rule.txt\n"
        "@@ -1 +1 @@\n-strict\n+stricter\n"
    )
    more = {"exclude": ["tests/*"], "test_patch": tests, "command": f"cat tests/rule.txt; {RUN}"}
    evaluated = await found(tmp_path, "echo 2 > code.txt; rm -r tests", **more)
    assert evaluated.reward == 1.0
    assert (tmp_path / "logs" / "evaluator.log").read_text().startswith("stricter\n")


async def test_partial_reward_is_the_share_of_passed_tests(tmp_path):
    evaluated = await found(tmp_path, "true", partial=True, fail_to_pass=["t::new", "t::gone"])
    assert evaluated.reward == pytest.approx(1 / 3)
    assert evaluated.metadata["not_passed"] == {"t::new": "failed", "t::gone": "not run"}


async def test_test_results_are_read_from_a_junit_file(tmp_path):
    xml = """<testsuite><testcase classname="t" name="new"/>
    <testcase classname="t" name="old"><skipped/></testcase></testsuite>"""
    command = f"cat > out.xml <<'END'\n{xml}\nEND"
    evaluated = await found(tmp_path, "true", command=command, junit="out.xml", partial=True)
    assert evaluated.metadata["not_passed"] == {"t::old": "skipped"}


async def test_a_junit_report_is_read_when_no_process_of_the_tests_is_left(tmp_path):
    alive, pid = [], tmp_path / "pid"
    case = '<testsuite><testcase classname="t" name="new"/></testsuite>'
    command = f"{LEAVE.format(pid)}; echo '{case}' > out.xml"
    kind = watching("out.xml", pid, alive)
    async with two_runtimes(tmp_path, "true", kind=kind) as context:
        tests = {"command": command, "junit": "out.xml", "fail_to_pass": ["t::new"]}
        evaluated = await TestOnOutput.from_config(tests).evaluate(context)
    assert evaluated.reward == 1
    assert alive == [False]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"command": "echo oh; exit 4"}, "ended with code 4 and name no failure: oh"),
        ({"command": "kill -9 $$"}, "they were ended by 9"),
        ({"command": "sleep 60", "timeout_s": 0.1}, "they did not end within 0.1 s"),
        ({"command": "true", "junit": "gone.xml"}, r"the tests left no \./gone\.xml"),
        ({"base": "no-such-commit"}, r"git .*bad revision .no-such-commit"),
        ({"include": ["code.txt"], "base": "HEAD~0", "work": "true"}, None),
        ({"command": f"{RUN.replace('FAILED', 'ERROR')}; exit 1", "work": "true"}, None),
    ],
)
async def test_a_test_run_without_results_is_an_evaluator_error(tmp_path, config, why):
    work = config.pop("work", "echo 2 > code.txt")
    if why is None:
        assert (await found(tmp_path, work, **config)).reward == 0.0
        return
    with pytest.raises(EvaluatorError, match=f"(?s){why}"):
        await found(tmp_path, work, **config)


async def test_a_patch_that_cannot_be_applied_makes_the_session_unscorable(tmp_path):
    # The deletions below `tests` are dropped; the link in its place then does not fit.
    work = "echo 2 > code.txt; rm -r tests; ln -s elsewhere tests"
    with pytest.raises(Unscorable, match="cannot be applied in a fresh runtime"):
        await found(tmp_path, work, exclude=["tests/*"])


@pytest.mark.parametrize(
    "left",
    [
        "git config diff.noprefix true",
        "git config diff.mnemonicPrefix true",
        "git config core.worktree /nowhere",
        "git config core.bare true",
        "rm -rf .git; git init -q .",
        "rm -rf .git; ln -s /nowhere .git",
        "git config diff.external false; git config core.fsmonitor 'echo >&2'",
        "echo '* filter=x' > .gitattributes; git config filter.x.clean 'sed s/strict/lax/'",
        "printf '#!/bin/sh\nexit 1\n' > .git/hooks/post-index-change; chmod +x .git/hooks/*",
        "mkfifo pipe; mkdir shut; echo 1 > shut/x; chmod 000 shut/x shut",
    ],
)
async def test_git_config_hooks_and_filters_of_the_agent_do_not_affect_the_patch(tmp_path, left):
    work = f"echo 2 > code.txt; echo lax > tests/rule.txt; echo x > tests/helper.txt; {left}"
    evaluated = await found(tmp_path, work, exclude=["tests/*"])
    assert evaluated.reward == 1.0
    assert evaluated.metadata["dropped"] == ["tests/helper.txt", "tests/rule.txt"]
    assert {"code.txt"} <= set(evaluated.metadata["changed"])


async def test_a_repository_replaced_by_a_link_to_a_host_folder_makes_the_session_unscorable(
    tmp_path,
):
    (tmp_path / "ours" / "repo").mkdir(parents=True)
    (tmp_path / "ours" / "repo" / "solution").write_text("secret")
    begin = f"mkdir -p in/repo && cd in/repo && {BEGIN}"
    work = f"rm -r in && ln -s {tmp_path}/ours in"
    async with two_runtimes(tmp_path, work, begin) as context:
        config = {"command": RUN, "fail_to_pass": ["t::new"], "repo": "in/repo"}
        with pytest.raises(Unscorable, match="left no repository"):
            await TestOnOutput.from_config(config).evaluate(context)


async def test_a_junit_report_left_by_the_agent_is_not_read(tmp_path):
    left = """echo '<testsuite><testcase classname="t" name="new"/></testsuite>' > out.xml"""
    config = {"command": "true", "junit": "out.xml", "pass_to_pass": []}
    with pytest.raises(EvaluatorError, match=r"the tests left no \./out.xml"):
        await found(tmp_path, left, **config)


async def test_a_deleted_repository_makes_the_session_unscorable(tmp_path):
    begin = f"mkdir sub; cd sub; {BEGIN}"
    async with two_runtimes(tmp_path, "rm -rf sub; ln -s /nowhere sub", begin) as context:
        config = {"command": RUN, "fail_to_pass": ["t::new"], "repo": "sub"}
        with pytest.raises(Unscorable, match="the agent left no repository in"):
            await TestOnOutput.from_config(config).evaluate(context)


def test_config_with_an_empty_fail_to_pass_is_refused():
    with pytest.raises(ConfigError, match="fail_to_pass"):
        TestOnOutput.from_config({"command": "true", "fail_to_pass": []})


def test_filter_patch_keeps_file_lines_that_look_like_diff_headers():
    one = "diff --git a/x y b/x y\n--- a/x y\n+++ b/x y\n@@ -1 +1 @@\n-a\n+diff --git a/q b/q\n"
    two = "diff --git a/t/z b/t/z\nnew file mode 100644\n"
    patch = filter_patch(one + two, ("*",), ("t/*",))
    assert (patch.text, patch.kept, patch.dropped) == (one, ("x y",), ("t/z",))


@pytest.mark.parametrize("path", ["conftest.py", "a/pytest.ini", ".cargo/config.toml"])
def test_filter_patch_drops_files_that_test_runners_obey(path):
    patch = filter_patch(f"diff --git a/{path} b/{path}\nnew file mode 100644\n", ("*",), ())
    assert (patch.text, patch.dropped) == ("", (path,))


HEAD = "=========== short test summary info ==========="
END = "======= 1 failed, 2 passed in 0.10s ======="


def test_only_the_last_pytest_summary_counts():
    said = f"PASSED a::z\n{HEAD}\nPASSED a::z\n{HEAD}\nFAILED a::x - why - not\nXFAIL a::y\n{END}"
    assert from_summary(said) == {"a::x": "failed", "a::y": "xfail"}


@pytest.mark.parametrize(
    "said",
    [
        f"{HEAD}\nPASSED a::x\n",
        f"PASSED a::x\n{END}",
        f"{HEAD}\nFAILED a::x\n{END}\n{HEAD}\nPASSED a::x\n{END}",
        f"{HEAD}\nPASSED a::x\n{END}\n{HEAD}\nFAILED a::x\n{END}",
        f"{HEAD}\nPASSED a::x\nERROR a::x - at teardown\n{END}",
        f"{HEAD}\nERROR a::x - at teardown\nPASSED a::x\n{END}",
        f"{HEAD}\nERROR a::x\n{END}\n{HEAD}\nPASSED a::x\n{END}",
        f"{HEAD}\nSKIPPED [1] a.py:1: why\nPASSED a::x\n=== 1 skipped in 0.10s ===",
        f"{HEAD}\nPASSED a::y\nPASSED a::z\nSKIPPED [1] a.py:1: why\fPASSED a::x\n{END}",
        f"{HEAD}\nPASSED a::y\nPASSED a::z\nSKIPPED [1] a.py:1: \n{HEAD}\nPASSED a::x\n{END}",
        f"{HEAD}\nPASSED a::y\nSKIPPED [1] a: \nPASSED a::x\n9 passed in 0.1s\n1 passed in 0.1s",
    ],
)
def test_a_test_counts_as_passed_only_in_a_complete_summary_that_never_reports_it_failed(said):
    assert from_summary(said).get("a::x") != "passed"


@pytest.mark.parametrize(
    ("more", "exit_code", "passed"),
    [("", 0, True), ("", 2, False), ("FAILED a::y\n", 1, True), ("FAILED a::x\n", 1, False)],
)
def test_a_harbor_task_is_solved_if_its_tests_pass_in_a_run_that_explains_its_exit_code(
    more, exit_code, passed
):
    said = f"{HEAD}\nPASSED a::x\n{more}{END}"
    assert all_passed(said, ["a::x"], exit_code) == passed


def test_a_test_of_a_junit_file_has_its_worst_status():
    ends = {"a": "", "b": "<failure/>", "c": "<error/>", "d": "<system-out/><skipped/>"}
    cases = [
        f'<testcase classname="t" name="{name}">{end}</testcase>' for name, end in ends.items()
    ]
    text = f"<testsuites><testsuite>{''.join([*cases, *cases[::-1]])}</testsuite></testsuites>"
    twice = text.replace("</testsuite>", '<testcase classname="t" name="b"/></testsuite>')
    expected = {"t::a": "passed", "t::b": "failed", "t::c": "error", "t::d": "skipped"}
    assert from_junit(twice.encode()) == expected


@pytest.mark.parametrize("text", [b"no xml", b"<!DOCTYPE a [<!ENTITY b 'c'>]><a/>"])
def test_a_file_that_is_no_junit_is_refused(text):
    with pytest.raises(EvaluatorError, match="the JUnit file"):
        from_junit(text)


FORGED = (
    "printf '%s\\n' 'print(\"=== short test summary info ===\")' 'print(\"PASSED t.py::test_it\")'"
    " 'print(\"== 1 passed in 0.01s ==\")' > {0}/pytest.py"
)


@pytest.mark.parametrize(
    ("place", "value", "reward"), [(".", 1, 0.0), ("src", 1, 0.0), (".", 2, 1.0)]
)
async def test_a_pytest_module_of_the_agent_does_not_replace_the_installed_one(
    tmp_path, place, value, reward
):
    """Python searches the folder first where `PYTHONSAFEPATH` is not set, or not known."""
    test = "from code_here import value\\n\\ndef test_it():\\n    assert value == 2\\n"
    begin = f"{BEGIN}; mkdir -p src; printf '{test}' > t.py; git add -A; git commit -qm t"
    left = f"echo value = {value} > {place}/code_here.py; {FORGED.format(place)}"
    path = "" if place == "." else f'PYTHONPATH="$PWD/{place}" '
    plain = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"  # starts in half the time
    command = f"{path}{plain} {sys.executable} -m pytest -p no:cacheprovider -rA t.py"
    async with two_runtimes(tmp_path, left, begin) as context:
        config = {"command": command, "fail_to_pass": ["t.py::test_it"]}
        assert (await TestOnOutput.from_config(config).evaluate(context)).reward == reward
