"""Tasks of releases, whole: a local index, real pip, builds and tests in bubblewrap."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pip
import pytest
from tests.datasets.packages import make_index, use_index
from tests.sandbox.images import put_image

from bridle.config import cache_dir
from bridle.datasets.jsonl import load_tasks
from bridle.runtimes.docker import client_environment, program

EXAMPLES = Path(__file__).parents[2] / "examples"
OFFLINE_DATA = EXAMPLES / "offline-data" / "run.py"
SWE_GRPO = EXAMPLES / "swe-grpo" / "run.py"

pytestmark = [
    pytest.mark.tasks,
    pytest.mark.core,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("index"),
]

AGENT = """
import json, os, subprocess, urllib.request
tool = {"type": "function", "function": {"name": "bash", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
messages = [{"role": "user", "content": open(os.environ["INSTRUCTION_FILE"]).read()}]
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
           "Content-Type": "application/json"}
while True:
    body = {"model": os.environ["MODEL"], "messages": messages, "tools": [tool]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    calls = messages[-1].get("tool_calls")
    if not calls:
        break
    for call in calls:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        said = done.stdout + done.stderr
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("releases")
    make_index(folder / "index")
    return folder


@pytest.fixture
def index(shared, monkeypatch):
    """The user's configuration of pip: one folder, and no network."""
    use_index(monkeypatch, shared / "index", shared / "cache")
    monkeypatch.setenv("BRIDLE_RUNTIME", "bubblewrap")


@pytest.fixture
def made(shared, say):
    """The task folder of the release with a new function, made once."""
    folder = shared / "tasks"
    if not folder.exists():
        places = ("--out", folder, "--harbor", shared / "harbor")
        said = say("tasks", "from-releases", "tinytext", *places, "--json")
        (shared / "said.json").write_text(said.out)
        assert said.code == 0, said.out
    return folder / "tinytext-1.1-1.2"


def test_each_pair_of_releases_becomes_a_task_or_is_refused_with_a_cause(made, shared):
    rows = json.loads((shared / "said.json").read_text())
    assert [(row["task"], row["verdict"]) for row in rows] == [
        ("tinytext 1.2..1.3", "no tests"),
        ("tinytext-1.1-1.2", "kept"),
        ("tinytext 1.0..1.1", "version bump"),
    ]
    assert rows[1]["detail"] == "1 tests to fix, 5 to keep; licence: MIT"
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_a_release_task_has_a_statement_tests_and_a_locked_environment(made):
    task = json.loads((made / "task.json").read_text())
    assert "version 1.1" in task["instruction"]
    assert "`shout` gives a text in capitals" in task["instruction"]
    assert "test_a_shout_has_one_mark" in task["instruction"]
    config = task["evaluator"]["config"]
    assert config["fail_to_pass"] == ["tests/test_text.py::test_a_shout_has_one_mark"]
    assert config["pass_to_pass"] == [f"tests/test_text.py::test_words_{n}" for n in range(5)]
    facts = task["metadata"]
    assert (facts["package"], facts["base"], facts["release"]) == ("tinytext", "1.1", "1.2")
    assert facts["licence"] == "MIT"
    lock = (made / "requirements.lock").read_text().splitlines()
    assert {line.split("==")[0] for line in lock} >= {"pytest", "pluggy", "iniconfig"}
    assert all("--hash=sha256:" in line for line in lock)


def test_harbor_folder_of_a_release_task_holds_nothing_of_the_newer_release(made, shared):
    folder = shared / "harbor" / made.name
    (read,) = load_tasks(folder, overrides={"runtime": {"backend": "docker"}})
    task = json.loads((made / "task.json").read_text())
    assert (read.task_id, read.instruction) == (task["task_id"], task["instruction"])
    assert task["metadata"].items() <= read.metadata.items()
    assert read.metadata["harbor"]["unused"] == []
    assert [path.name for path in folder.parent.iterdir()] == [made.name]
    files = [path for path in (folder / "environment").rglob("*") if path.is_file()]
    assert "def words" in "".join(path.read_text() for path in files)
    assert not any("shout" in path.read_text() for path in files)
    script = (folder / "tests" / "test.sh").read_text()
    assert "export PYTHONSAFEPATH=1" in script
    assert 'python "$tests/run_pytest.py" -rA' in script


@pytest.fixture
def base_image(shared):
    """An image with Python, pip and git, whose pip has the index for its only one."""
    folder = shared / "base"
    shutil.copytree(shared / "index", folder / "index")
    shutil.copytree(Path(pip.__file__).parent, folder / "pip")
    (folder / "Dockerfile").write_text(
        f"FROM {put_image(large=True)}\nCOPY index /index\n"
        "COPY pip /usr/lib/python3/dist-packages/pip\n"
        "ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/index PIP_BREAK_SYSTEM_PACKAGES=1\n"
        "RUN ln -s python3 /usr/bin/python\n"
    )
    words = (program(), "build", "--quiet", "--tag", "bridle-test-pip", folder)
    subprocess.run(words, env=client_environment(), check=True)
    return "bridle-test-pip"


def test_harbor_folder_of_a_release_task_is_sound_in_its_built_image(
    made, shared, base_image, say, tmp_path, monkeypatch
):
    monkeypatch.setenv("BRIDLE_RUNTIME", "docker")
    folder = shutil.copytree(shared / "harbor" / made.name, tmp_path / made.name)
    dockerfile = folder / "environment" / "Dockerfile"
    text = dockerfile.read_text()
    dockerfile.write_text(re.sub("(?m)^ARG BASE=.*$", f"ARG BASE={base_image}", text))
    said = say("tasks", "verify", folder, "--json")
    assert (said.code, said.json[0]["verdict"]) == (0, "sound"), said.out + said.err


@pytest.fixture
def run_with(made, say, tmp_path):
    """Runs the task by a small agent that does what a script says."""

    def run(*commands: str) -> dict:
        folder = tmp_path / "task"
        shutil.copytree(made, folder)
        task = json.loads((folder / "task.json").read_text())
        task["agent"] = {"harness": "command", "command": "python /tmp/agent.py"}
        agent = {"type": "upload_file", "source": "agent.py", "target": "/tmp/agent.py"}
        task["runtime"]["prepare"].append(agent)
        (folder / "agent.py").write_text(AGENT)
        (folder / "task.json").write_text(json.dumps(task))
        turns = [{"shell": [command]} for command in commands] + [{"content": "done"}]
        script = tmp_path / "script.json"
        script.write_text(json.dumps({"conversations": [{"turns": turns}]}))
        out = tmp_path / "run"
        said = say("run", folder, "--engine", f"scripted:{script}", "--out", out)
        assert said.code == 0, said.out + said.err
        (line,) = (out / "trajectories.jsonl").read_text().splitlines()
        return json.loads(line)

    return run


def test_an_agent_that_makes_the_reference_change_has_reward_1(made, run_with):
    patch = (made / "solution" / "reference.patch").read_text()
    result = run_with(f"git apply - <<'END'\n{patch}END", "python -m pytest tests -q")
    assert result["reward"] == 1.0


def test_an_idle_agent_has_reward_0(run_with):
    assert run_with()["reward"] == 0.0


def test_an_agent_finds_the_older_release_and_no_trace_of_the_newer(run_with):
    look = (
        "import tinytext, importlib.metadata as m; print(tinytext.__file__, m.version('tinytext'))"
    )
    places = "/work /tmp /home $(dirname $(dirname $(which python)))"
    trace = f"grep -rlE '(shout|1[.]2)' {places} --include='*.py' --include='*.md' | grep -c tiny"
    commits = "git log --oneline --all | wc -l"
    look = f'python -c "{look}"; echo commits $({commits}); echo traces $({trace})'
    prompt = json.dumps(run_with(look))
    assert "/work/src/tinytext/__init__.py 1.1" in prompt
    assert "commits 1" in prompt
    assert "traces 0" in prompt


def test_offline_data_example_makes_and_resumes_a_data_set_of_a_package(shared, say, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PIP_CONFIG_FILE", "PIP_NO_INDEX", "PIP_FIND_LINKS", "BRIDLE_CACHE"):
            patch.delenv(name)
        assert say("harness", "check", "mini_swe_agent").code == 0
        installed = cache_dir() / "bundles"
    (shared / "cache").mkdir(exist_ok=True)
    (shared / "cache" / "bundles").symlink_to(installed)

    def example(samples: int) -> tuple[str, str]:
        options = ("--samples", str(samples), "--price", "1", "--out", str(tmp_path))
        command = [sys.executable, str(OFFLINE_DATA), "tinytext", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stderr, (tmp_path / "report.md").read_text()

    interrupted = tmp_path / "tasks" / "other" / "other-1-2"
    interrupted.mkdir(parents=True)
    (interrupted / "task.json").write_text("{}")
    _, report = example(1)
    assert not interrupted.exists()
    assert "| no tests | 1 | 33 |" in report
    assert "| all | 3 | 100 |" in report
    assert "| tinytext / mini_swe_agent | 1 | 1 | 100 | 3.0 |" in report
    said, report = example(3)
    assert "building" not in said
    assert "| tinytext / mini_swe_agent | 3 | 3 | 100 | 3.0 |" in report
    rounds = tmp_path / "set" / "rounds"
    sizes = [len((run / "trajectories.jsonl").read_text().splitlines()) for run in rounds.iterdir()]
    assert sorted(sizes) == [1, 2]
    assert len((tmp_path / "set" / "data.jsonl").read_text().splitlines()) == 3


def test_a_release_task_is_sound_in_an_environment_rebuilt_from_its_lock(made, shared):
    assert made.is_dir()
    command = [sys.executable, "-m", "benchmarks.releases", str(shared)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    assert "| sound | 1 | 100 |" in done.stdout


def test_swe_grpo_smoke_run_trains_and_exports_a_model_on_release_tasks(made, tmp_path):
    for package in ("one", "two", "three"):
        folder = shutil.copytree(made, tmp_path / "tasks" / package)
        task = json.loads((folder / "task.json").read_text())
        task["metadata"]["package"] = package
        (folder / "task.json").write_text(json.dumps(task))
    out = tmp_path / "out"
    sizes = {"steps": 2, "groups": 1, "samples": 2, "held-out-samples": 1}
    sizes |= {"demonstrations": 1, "sft-steps": 20, "concurrency": 2}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(SWE_GRPO), "--smoke", "--tasks", str(tmp_path / "tasks")]
    command += ["--engine", "embedded", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (out / "report.md").read_text()
    places = [line.split(" | ")[0] for line in report.splitlines()[2:5]]
    assert places == ["| before, 0 updates", "| during, 1 updates", "| after, 2 updates"]
    assert "of 2 groups (" in report
    assert {path.name for path in (out / "exported").iterdir()} >= {"config.json", "tokenizer.json"}
    (line,) = (out / "check" / "trajectories.jsonl").read_text().splitlines()
    assert json.loads(line)["session_id"].startswith("one.")


def test_a_task_whose_solution_does_not_solve_it_is_not_sound(made, say, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(made, broken)
    (broken / "solution" / "solve.sh").write_text("true\n")
    said = say("tasks", "verify", broken, "--json")
    assert said.code == 1
    assert said.json[0]["verdict"] == "oracle is not 1"
    assert say("tasks", "verify", made).code == 0


def test_building_source_distributions_without_a_sandbox_needs_an_explicit_flag(
    say, tmp_path, monkeypatch
):
    monkeypatch.setenv("BRIDLE_RUNTIME", "local")
    said = say("tasks", "from-releases", "tinytext", "--out", tmp_path / "out")
    assert said.code == 2
    assert "--runtime local" in said.err
    accepted = ("tinytext==1.1..1.2", "--out", tmp_path / "out", "--runtime", "local")
    said = say("tasks", "from-releases", *accepted)
    assert said.code == 0, said.out


def test_a_harbor_folder_inside_the_task_folder_is_refused(say, tmp_path):
    said = say("tasks", "from-releases", "tinytext", "--out", tmp_path, "--harbor", tmp_path / "h")
    assert (said.code, "must lie outside of --out" in said.err) == (2, True)


def test_from_releases_names_a_version_that_the_index_lacks(say, tmp_path):
    said = say("tasks", "from-releases", "tinytext==1.0..9.0", "--out", tmp_path / "out")
    assert (said.code, "no source distribution (.tar.gz) of tinytext 9.0" in said.err) == (2, True)


def test_instruction_with_hint_none_contains_neither_tests_nor_release_notes(say, tmp_path):
    wanted = ("tinytext==1.1..1.2", "--hint", "none")
    assert say("tasks", "from-releases", *wanted, "--out", tmp_path / "out").code == 0
    text = json.loads(Path(tmp_path, "out", "tinytext-1.1-1.2", "task.json").read_text())
    assert "shout" not in text["instruction"]
