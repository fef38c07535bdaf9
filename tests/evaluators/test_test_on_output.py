import secrets
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.evaluators.made import evaluation

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError, EvaluatorError
from bridle.evaluators.test_on_output import TestOnOutput, filtered, from_junit, from_summary
from bridle.runtimes.local import LocalRuntime

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
exit $fail"""


@asynccontextmanager
async def two_runtimes(folder, work):
    """A context whose fresh runtime is untouched and whose session did `work`."""
    scratch = folder / "session"
    scratch.mkdir()
    session = LocalRuntime(RuntimeSpec(), f"s-{secrets.token_hex(8)}", scratch)
    await session.start()
    try:
        async with evaluation(folder) as context:
            for runtime in (session, context.runtime):
                assert (await runtime.exec(BEGIN)).ok
            assert (await session.exec(work)).ok
            yield replace(context, session_runtime=session)
    finally:
        await session.stop()


async def found(folder, work, **config):
    named = {"command": RUN, "fail_to_pass": ["t::new"], "pass_to_pass": ["t::old"]}
    async with two_runtimes(folder, work) as context:
        return await TestOnOutput.from_config({**named, **config}).evaluate(context)


@pytest.mark.parametrize(
    ("work", "reward", "changed"),
    [
        ("echo 2 > code.txt", 1.0, ["code.txt"]),
        ("echo 2 > code.txt; git commit -qam mine", 1.0, ["code.txt"]),
        ("true", 0.0, []),
        ("echo 2 > code.txt; rm tests/rule.txt", 0.0, ["code.txt", "tests/rule.txt"]),
        ("echo 2 > code.txt; printf 'c\\0d' > blob; echo n > 'new file'", 1.0,
         ["blob", "code.txt", "new file"]),
    ],
)  # fmt: skip
async def test_what_was_changed_is_tested_in_a_fresh_place(tmp_path, work, reward, changed):
    evaluated = await found(tmp_path, work)
    assert evaluated.reward == reward
    assert evaluated.metadata["changed"] == changed


async def test_changes_to_tests_stay_out(tmp_path):
    work = "echo 2 > code.txt; echo lax > tests/rule.txt; echo x > tests/helper.txt"
    evaluated = await found(tmp_path, work, exclude=["tests/*"])
    assert evaluated.reward == 1.0
    assert evaluated.metadata["dropped"] == ["tests/helper.txt", "tests/rule.txt"]


async def test_a_patch_of_tests_is_applied_after_the_agent_s(tmp_path):
    tests = (
        "diff --git a/tests/rule.txt b/tests/rule.txt\n--- a/tests/rule.txt\n+++ b/tests/rule.txt\n"
        "@@ -1 +1 @@\n-strict\n+stricter\n"
    )
    more = {"exclude": ["tests/*"], "test_patch": tests, "command": f"cat tests/rule.txt; {RUN}"}
    evaluated = await found(tmp_path, "echo 2 > code.txt; rm -r tests", **more)
    assert evaluated.reward == 1.0
    assert (tmp_path / "logs" / "evaluator.log").read_text().startswith("stricter\n")


async def test_a_share_is_rewarded_if_asked(tmp_path):
    evaluated = await found(tmp_path, "true", partial=True, fail_to_pass=["t::new", "t::gone"])
    assert evaluated.reward == pytest.approx(1 / 3)
    assert evaluated.metadata["not_passed"] == {"t::new": "failed", "t::gone": "not run"}


async def test_a_junit_file_tells_the_results(tmp_path):
    xml = """<testsuite><testcase classname="t" name="new"/>
    <testcase classname="t" name="old"><skipped/></testcase></testsuite>"""
    command = f"cat > out.xml <<'END'\n{xml}\nEND"
    evaluated = await found(tmp_path, "true", command=command, junit="out.xml", partial=True)
    assert evaluated.metadata["not_passed"] == {"t::old": "skipped"}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"command": "echo oh; exit 4"}, "ended with code 4 and name no failure: oh"),
        ({"command": "kill -9 $$"}, "the tests ended by 9"),
        ({"command": "sleep 60", "timeout_s": 0.1}, "the tests did not end in time"),
        ({"command": "true", "junit": "gone.xml"}, r"the tests left no \./gone\.xml"),
        ({"base": "no-such-commit"}, "git diff: .*no-such-commit"),
        ({"include": ["code.txt"], "base": "HEAD~0", "work": "true"}, None),
    ],
)
async def test_what_says_nothing_about_the_session_is_no_reward(tmp_path, config, why):
    work = config.pop("work", "echo 2 > code.txt")
    if why is None:
        assert (await found(tmp_path, work, **config)).reward == 0.0
        return
    with pytest.raises(EvaluatorError, match=f"(?s){why}"):
        await found(tmp_path, work, **config)


async def test_a_patch_that_does_not_fit_is_the_evaluator_s_failure(tmp_path):
    async with two_runtimes(tmp_path, "echo 2 > code.txt") as context:
        tree = await context.runtime.exec("git rev-parse HEAD^{tree}")
        await context.runtime.exec("echo 9 > code.txt")
        config = {"command": RUN, "fail_to_pass": ["t"], "base": tree.stdout.decode().strip()}
        with pytest.raises(EvaluatorError, match="cannot be applied in a fresh runtime"):
            await TestOnOutput.from_config(config).evaluate(context)


async def test_without_a_fresh_runtime_it_refuses(tmp_path):
    async with evaluation(tmp_path) as context:
        with pytest.raises(EvaluatorError, match=r"needs evaluator\.refresh_runtime = true"):
            await TestOnOutput.from_config({"command": "true", "fail_to_pass": ["t"]}).evaluate(
                context
            )


def test_a_task_without_a_test_that_must_pass_is_refused():
    with pytest.raises(ConfigError, match="fail_to_pass"):
        TestOnOutput.from_config({"command": "true", "fail_to_pass": []})


def test_a_file_in_a_patch_is_one_part_whatever_its_lines_say():
    one = "diff --git a/x y b/x y\n--- a/x y\n+++ b/x y\n@@ -1 +1 @@\n-a\n+diff --git a/q b/q\n"
    two = "diff --git a/t/z b/t/z\nnew file mode 100644\n"
    patch = filtered(one + two, ("*",), ("t/*",))
    assert (patch.text, patch.kept, patch.dropped) == (one, ("x y",), ("t/z",))


def test_only_the_last_summary_counts():
    head = "=========== short test summary info ==========="
    said = f"PASSED a::z\n{head}\nPASSED a::x\n{head}\nFAILED a::x - why - not\nXFAIL a::y\nother"
    assert from_summary(said) == {"a::x": "failed", "a::y": "xfail"}


@pytest.mark.parametrize("text", [b"no xml", b"<!DOCTYPE a [<!ENTITY b 'c'>]><a/>"])
def test_a_file_that_is_no_junit_is_refused(text):
    with pytest.raises(EvaluatorError, match="the JUnit file"):
        from_junit(text)
