import gzip
import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from tests.datasets.packages import add, make_index, use_index
from tests.peaks import peak_kib
from tests.runtimes.test_files import chain_of_links, packed

from bridle.datasets.environments import (
    Bench,
    Refused,
    VirtualEnvironment,
    Wheel,
    build_system,
    requirement,
)
from bridle.datasets.jsonl import load_tasks
from bridle.datasets.releases import (
    Change,
    Maker,
    brings,
    change_notes,
    divide,
    file_requirements,
    group_requirements,
    is_test,
    outcomes,
    pairs,
    parse_wanted,
    requirements_of_tests,
    statement,
    unpack,
    without_versions,
)
from bridle.datasets.sources import fetch
from bridle.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "offline-data"
VERSIONS = (Version("1.0"), Version("1.1"))
PATCH = """diff --git a/src/p/__init__.py b/src/p/__init__.py
--- a/src/p/__init__.py
+++ b/src/p/__init__.py
@@ -1,2 +1,4 @@
-__version__ = "1.0"
+__version__ = "1.1"
+# A remark.
+def more():
+    return 1
diff --git a/tests/test_p.py b/tests/test_p.py
--- a/tests/test_p.py
+++ b/tests/test_p.py
@@ -1 +1 @@
-old = 1
+new = 1
diff --git a/CHANGES b/CHANGES
--- a/CHANGES
+++ b/CHANGES
@@ -1 +1 @@
-x
+y
"""


def wheel(**changes):
    fields = {
        "name": "p", "version": "1.0", "requires": (), "extras": frozenset(), "licence": "MIT",
        "headers": "", "entry_points": "", "files": frozenset({"p/__init__.py"}),
    }  # fmt: skip
    return Wheel(**(fields | changes))


@pytest.mark.parametrize("wanted", ["p==1.0", "p==2.0..1.0", "p>=1", "p==1.0..x", "", "-r x"])
def test_an_argument_other_than_a_package_or_release_range_is_refused(wanted):
    with pytest.raises(ConfigError, match=r"must be PACKAGE or PACKAGE==A\.\.B"):
        parse_wanted(wanted)


@pytest.mark.parametrize("name", ["packages.txt", "kept.txt"])
def test_package_lists_of_the_example_are_sorted_release_ranges(name):
    listed = (EXAMPLE / name).read_text().split()
    assert all(len(parse_wanted(wanted)[1]) == 2 for wanted in listed)
    assert listed == sorted(set(listed))


def test_a_release_range_is_parsed_into_package_and_two_versions():
    assert parse_wanted("p==1.0..1.1") == ("p", VERSIONS)
    assert parse_wanted("p") == ("p", ())


def test_a_diff_is_divided_into_reference_patch_and_tests():
    change = divide(PATCH, "src", {"p/__init__.py"})
    assert change.test_files == ("tests/test_p.py",)
    assert "def more" in change.source
    assert "CHANGES" not in change.source + change.tests
    assert change.lines == {
        '-__version__ = "1.0"', '+__version__ = "1.1"', "+def more():", "+return 1",
    }  # fmt: skip
    assert without_versions(change.lines, VERSIONS) == {"+def more():", "+return 1"}


def test_changed_tests_that_a_task_file_cannot_hold_are_refused():
    with pytest.raises(Refused, match="encoding"):
        divide(PATCH.replace("new = 1", "new = '\udce9'"), "src", {"p/__init__.py"})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tests/data.txt", True),
        ("p/test/x.py", True),
        ("p/test_x.py", True),
        ("p/testing.py", False),
    ],
)
def test_test_files_are_recognised_by_folder_or_file_name(path, expected):
    assert is_test(Path(path)) is expected


def a_change(*lines):
    return Change("patch", "tests", ("tests/test_p.py",), frozenset(lines))


def test_a_version_bump_an_oversized_change_and_a_near_duplicate_are_refused_by_cause():
    maker = Maker(Path("out"), "notes", Bench("local"), print)
    big = [f"+{n}" for n in range(401)]
    refused = {
        "version bump": a_change("+v = '1.1'", "-v = '1.0'", "+(1, 1)"),
        "size of the change": a_change(*big),
    }
    for cause, change in refused.items():
        with pytest.raises(Refused) as error:
            maker._check(change, VERSIONS)
        assert error.value.cause == cause
    for accepted in (3, 10, 400):
        maker._check(a_change(*big[:accepted]), VERSIONS)
    maker.kept.append(("p-1-2", a_change(*big[:10])))
    with pytest.raises(
        Refused, match=r"near-duplicate: 90% of the lines that it or the task p-1-2 changes"
    ):
        maker._check(a_change(*big[:9]), VERSIONS)
    with pytest.raises(Refused, match="near-duplicate: 80%"):
        maker._check(a_change(*big[:8]), VERSIONS)
    maker._check(a_change(*big[:7]), VERSIONS)


def test_tests_that_pass_only_with_the_change_are_separated_from_those_that_always_pass():
    always = {f"t::{n}": "passed" for n in range(5)}
    before = always | {"t::new": "failed", "t::odd": "passed"}
    after = always | {"t::new": "passed", "t::odd": "passed", "t::collected": "passed"}
    found = outcomes(before, after, after | {"t::odd": "failed"}, seconds=1.0)
    assert found.fail == ("t::collected", "t::new")
    assert (found.keep, found.flaky) == (tuple(always), ("t::odd",))
    with pytest.raises(Refused, match="no failing test"):
        outcomes(after, after, after, seconds=1.0)
    with pytest.raises(Refused, match="few passing tests: only 4 tests pass"):
        outcomes(dict.fromkeys(list(always)[:4], "passed"), always, always, seconds=1.0)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder that pip takes for its only index."""
    use_index(monkeypatch, tmp_path / "index", tmp_path / "cache")
    return tmp_path / "index"


async def test_pairs_of_releases_are_newest_first_and_pass_over_pre_releases(index):
    index.mkdir()
    for version in ("1.0", "1.1rc1", "1.1", "1.10"):
        (index / f"p-{version}.tar.gz").touch()

    async def named(wanted):
        return [(str(older.version), str(newer.version)) for older, newer in await pairs(wanted)]

    assert await named("p") == [("1.1", "1.10"), ("1.0", "1.1")]
    assert await named("p==1.1rc1..1.1") == [("1.1rc1", "1.1")]


@pytest.mark.timeout(60)
async def test_two_releases_of_a_package_become_a_task_folder(tmp_path, index):
    """They are built and tested without a sandbox; `tests/cli/test_tasks.py` uses one."""
    make_index(index)
    maker = Maker(tmp_path / "out", "tests", Bench("local"), print)
    ((older, newer),) = await pairs("tinytext==1.1..1.2")
    made = await maker.make(older, newer)
    config = json.loads((made.folder / "task.json").read_text())["evaluator"]["config"]
    assert config["fail_to_pass"] == ["tests/test_text.py::test_a_shout_has_one_mark"]
    assert config["pass_to_pass"] == [f"tests/test_text.py::test_words_{n}" for n in range(5)]
    assert "tests/test_text.py" in config["exclude"]
    assert "+def test_a_shout_has_one_mark" in config["test_patch"]
    assert "python -m pytest" in config["command"]
    assert "+def shout" in (made.folder / "solution" / "reference.patch").read_text()
    assert "shout" not in (made.folder / "repo" / "src" / "tinytext" / "__init__.py").read_text()
    assert [name for name, _ in maker.kept] == ["tinytext-1.1-1.2"]


@pytest.mark.parametrize(
    ("command", "last"), [("echo one; echo two", "two"), ("true", "no output"), ("nope", "nope")]
)
async def test_a_test_run_without_results_is_refused_with_its_last_line(tmp_path, command, last):
    maker = Maker(tmp_path / "out", "tests", Bench("local"), print)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "p.py").touch()
    environment = VirtualEnvironment(tmp_path / "environment", "")
    with pytest.raises(Refused, match=f"tests do not run: .* no result of a test: .*{last}"):
        await maker._statuses(tmp_path / "base", [], environment, command)


def test_change_notes_are_the_lines_that_the_release_added(tmp_path):
    for part, text in (
        ("base", "## 1.0\n- old\n"),
        ("release", "## 1.1\n- new thing\n\n## 1.0\n- old\n"),
    ):
        (tmp_path / part / "docs").mkdir(parents=True)
        (tmp_path / part / "docs" / "CHANGES.rst").write_text(text)
    assert change_notes(tmp_path / "base", tmp_path / "release") == "## 1.1\n- new thing"
    assert change_notes(tmp_path / "release", tmp_path / "release") == ""


def test_hint_level_adds_tests_and_then_notes_to_the_statement():
    wheels = (wheel(), wheel(version="1.1"))
    texts = [statement(hint, wheels, ["t::new"], "Note.") for hint in ("none", "tests", "notes")]
    assert ["1.1" in text for text in texts] == [True, True, True]
    assert ["t::new" in text for text in texts] == [False, True, True]
    assert ["Note." in text for text in texts] == [False, False, True]
    long = statement("notes", wheels, [f"t::{n}" for n in range(51)], "x" * 9000)
    assert ("- t::49\n- and 1 more" in long, "x" * 8001 in long) == (True, False)


def test_requirements_of_tests_come_from_extras_groups_or_files(tmp_path):
    requires = (
        "attrs>=20",
        "mock; extra == 'tests'",
        "old; python_version < '3'",
        "x; extra == 'doc'",
    )
    needed = wheel(requires=tuple(map(Requirement, requires)), extras=frozenset({"tests", "doc"}))
    assert requirements_of_tests(tmp_path, needed) == ["pytest", "attrs>=20", "mock"]
    plain = wheel()
    (tmp_path / "pyproject.toml").write_text("[dependency-groups]\ndev = ['ruff']\n")
    assert requirements_of_tests(tmp_path, plain) == ["pytest", "ruff"]
    (tmp_path / "test-requirements.txt").write_text("-r other.txt\nmock>=1 # why\n-e .\n./x\n")
    assert requirements_of_tests(tmp_path, plain) == ["pytest", "mock>=1"]


def test_requirements_of_an_extra_include_extras_of_the_same_package():
    requires = ("p[test]; extra == 'dev'", "mock; extra == 'test'")
    needed = wheel(requires=tuple(map(Requirement, requires)))
    assert needed.needs("dev") == ["mock"]


def test_a_lock_that_contains_the_package_itself_is_detected():
    lock = "Tiny.Text==2.0 --hash=sha256:00\npytest==9.0 --hash=sha256:00\n"
    assert brings(lock, "tiny-text")
    assert not brings(lock, "tiny")


def test_dependency_groups_that_include_each_other_are_resolved_without_a_loop():
    groups = {"a": ["x", {"include-group": "b"}], "b": [{"include-group": "a"}]}
    assert set(group_requirements(groups, "a")) == {"x"}


def test_requirements_with_urls_options_or_local_files_are_refused(tmp_path):
    for text in ("p @ https://example.org/p.whl", "--index-url x", "p @ file:///etc/passwd"):
        with pytest.raises(Refused, match="environment"):
            requirement(text)
    (tmp_path / "pyproject.toml").write_text("[build-system]\nrequires = ['-r /etc/passwd']\n")
    with pytest.raises(Refused, match="environment"):
        build_system(tmp_path)
    (tmp_path / "link.txt").symlink_to("/etc/hosts")
    assert file_requirements(tmp_path / "link.txt") == []


def archive(path, *names, link=None):
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            add(tar, name, b"text")
        if link is not None:
            entry = tarfile.TarInfo("p-1/link")
            entry.type, entry.linkname = tarfile.SYMTYPE, link
            tar.addfile(entry)
    return path


def test_a_source_archive_with_an_entry_outside_its_folder_is_refused(tmp_path):
    assert unpack(archive(tmp_path / "a.tar.gz", "p-1/x")).name == "p-1"
    bad = archive(tmp_path / "b.tar.gz", "../x"), archive(tmp_path / "c.tar.gz", link="/etc")
    for path in bad:
        with pytest.raises(Refused, match="source distribution"):
            unpack(path)


def test_a_source_archive_with_a_link_chain_beyond_4096_bytes_is_refused_without_a_write(tmp_path):
    folder = tmp_path / "fetched"
    for each in (folder, tmp_path / "victim"):
        each.mkdir()
    packed(folder / "p.tar", *chain_of_links(folder.resolve() / "tree" / "p-1"))
    (folder / "p.tar.gz").write_bytes(gzip.compress((folder / "p.tar").read_bytes()))
    with pytest.raises(Refused, match="leads out of its folder"):
        unpack(folder / "p.tar.gz")
    assert not list((tmp_path / "victim").iterdir())


def test_a_source_archive_with_a_huge_header_is_refused_in_bounded_memory(tmp_path):
    entry = tarfile.TarInfo("head")
    entry.type, entry.size = tarfile.XHDTYPE, 1 << 30
    zeros = gzip.compress(bytes(64 << 20), compresslevel=1)
    (tmp_path / "p.tar.gz").write_bytes(gzip.compress(entry.tobuf()) + zeros * 16)
    before = peak_kib(reset=True)
    with pytest.raises(Refused, match="too many files or bytes"):
        unpack(tmp_path / "p.tar.gz")
    assert peak_kib() - before < 100 << 10


def test_a_download_with_another_hash_than_the_index_names_is_refused(tmp_path):
    answer = SimpleNamespace(iter_content=lambda _: io.BytesIO(b"other"))
    link = SimpleNamespace(hash_name="sha256", hash="0" * 64)
    with pytest.raises(ValueError, match="another sha256 hash than the package index says"):
        fetch(answer, link, tmp_path / "p.tar.gz")


def test_oracle_harness_of_a_task_folder_gets_its_solution_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "solution").mkdir(parents=True)
        (tmp_path / name / "solution" / "solve.sh").write_text("true")
        task = {"task_id": name, "instruction": "x"}
        (tmp_path / name / "task.json").write_text(json.dumps(task))
    tasks = load_tasks(tmp_path, overrides={"agent": {"harness": "oracle"}})
    folders = [task.agent.settings["solution"] for task in tasks]
    assert folders == [str(tmp_path / name / "solution") for name in ("a", "b")]
    assert load_tasks(tmp_path)[0].agent.settings == {}
