import importlib
import itertools
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel

from bridle.config import Settings, Task
from bridle.evaluators import EVALUATORS
from bridle.harnesses import CHECKS, HARNESSES
from bridle.runtimes import RUNTIMES, apptainer, bubblewrap, docker, remote
from bridle.server.schemas import GroupOptions
from bridle.server.settings import INSIDE, RULES, SubmissionPolicy, names_files

BASE = {
    "task_id": "t",
    "instruction": "x",
    "runtime": {"backend": "docker"},
    "agent": {"harness": "codex"},
}


def refused(permits, **changes):
    return dict(permits.refused(Task.model_validate(BASE | changes)))


def runtime(**fields):
    return {"runtime": {"backend": "docker", **fields}}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("runtime.backend", runtime(backend="local")),
        ("runtime.backend", runtime(backend="mine.runtime:Class")),
        (
            "runtime.prepare[1].source",
            runtime(
                prepare=[
                    {"type": "exec", "command": "true"},
                    {"type": "upload_file", "source": "/etc/passwd", "target": "x"},
                ]
            ),
        ),
        (
            "runtime.eval_prepare[0].source",
            runtime(
                eval_prepare=[
                    {"type": "upload_dir", "source": "tests", "target": "x"},
                ]
            ),
        ),
        ("runtime.kwargs.binds", runtime(backend="bubblewrap", kwargs={"binds": ["/root"]})),
        ("runtime.image", runtime(backend="bubblewrap", image="/")),
        ("runtime.image", runtime(backend="apptainer", image="/srv/x.sif")),
        ("runtime.kwargs", runtime(backend="remote")),
        (
            "runtime.kwargs",
            runtime(backend="remote", kwargs={"deployment": {"type": "remote", "host": "inside"}}),
        ),
        ("runtime.kwargs.build", runtime(kwargs={"build": "/srv"})),
        ("agent.import_path", {"agent": {"import_path": "mine:Harness"}}),
        ("agent.function", {"agent": {"harness": "function", "function": "os:system"}}),
        ("agent.function", {"agent": {"harness": "function", "function": "/srv/a.py:run"}}),
        (
            "agent.settings.modules[0]",
            {"agent": {"harness": "function", "settings": {"modules": ["runs"]}}},
        ),
        (
            "agent.settings.solution",
            {"agent": {"harness": "oracle", "settings": {"solution": "/"}}},
        ),
        ("agent.settings.new", {"agent": {"harness": "codex", "settings": {"new": "/etc"}}}),
        ("runtime.kwargs.new", runtime(kwargs={"new": "/etc"})),
        ("runtime.kwargs.binds", runtime(backend="bubblewrap", kwargs={"binds": ["."]})),
        ("runtime.kwargs.binds", runtime(kwargs={"binds": ["/root:/inside"]})),
        ("runtime.image", runtime(image="--volume=/:/host")),
        ("runtime.network", runtime(backend="bubblewrap", network="open")),
        ("runtime.network", runtime(backend="apptainer", image="docker://x", network="open")),
        ("runtime.image", runtime(backend="apptainer", image="docker-archive:/srv/x.tar")),
        ("agent.skills_path", {"agent": {"harness": "codex", "skills_path": "skills"}}),
        ("fork.capture", {"fork": {"capture": "/srv/capture.sqlite", "session": "s", "at": 1}}),
        ("branching.at", {"branching": {"at": [1]}}),
        ("owner", {"owner": "another"}),
        ("task_dir", {"task_dir": "/srv/tasks"}),
        ("builder.strategy", {"builder": {"strategy": "mine:build"}}),
        ("evaluator.strategy", {"evaluator": {"strategy": "mine:Evaluator"}}),
        ("evaluator.config.tests", {"evaluator": {"strategy": "harbor"}}),
        (
            "evaluator.config.python",
            {
                "evaluator": {
                    "strategy": "bridle.evaluators.patch:SwebenchEvaluator",
                    "config": {"instance": {}, "python": "/bin/sh"},
                }
            },
        ),
        ("evaluator.config.new", {"evaluator": {"strategy": "command", "config": {"new": 1}}}),
        (
            "evaluator.config.function",
            {
                "evaluator": {
                    "strategy": "function",
                    "config": {"function": "os:system"},
                }
            },
        ),
        (
            "evaluator.config.python",
            {
                "evaluator": {
                    "strategy": "swebench",
                    "config": {"instance": {}, "python": "/bin/sh"},
                }
            },
        ),
        (
            "evaluator.config.parts[1].config.function",
            {
                "evaluator": {
                    "strategy": "composite",
                    "config": {
                        "parts": [
                            {"strategy": "command"},
                            {"strategy": "function", "config": {"function": "os:system"}},
                        ]
                    },
                }
            },
        ),
    ],
)
def test_unlisted_values_are_refused_by_the_fields_name(field, changes):
    assert field in refused(SubmissionPolicy(), **changes)


def test_a_plain_task_is_permitted():
    assert refused(SubmissionPolicy()) == {}


def test_open_network_of_the_machine_needs_the_operators_permission():
    assert refused(SubmissionPolicy(), **runtime(network="open")) == {}, "a container's is its own"
    own = runtime(backend="bubblewrap", network="open")
    assert refused(SubmissionPolicy(host_network=True), **own) == {}


def test_listed_imports_pass_and_their_neighbours_do_not():
    listed = ("mine", "other.module:Class")
    for name, ok in (
        ("mine:A", True),
        ("mine.deep:A", True),
        ("miner:A", False),
        ("other.module:Class", True),
        ("other.module:Else", False),
    ):
        trusted = SubmissionPolicy(trusted=listed)
        assert (refused(trusted, agent={"import_path": name}) == {}) is ok, name
        agent = {"harness": "function", "function": name}
        assert (refused(SubmissionPolicy(import_paths=listed), agent=agent) == {}) is ok, name


def test_import_paths_do_not_permit_code_on_the_server():
    permits = SubmissionPolicy(import_paths=("mine",))
    for change in (
        {"agent": {"import_path": "mine:Harness"}},
        {"evaluator": {"strategy": "mine:Evaluator"}},
        {"builder": {"strategy": "mine:build"}},
        runtime(backend="mine:Runtime"),
    ):
        (reason,) = refused(permits, **change).values()
        assert "permits.trusted: none" in reason


def scored(*functions, sandbox=None):
    """A composite evaluator of scoring functions."""
    own = {} if sandbox is None else {"sandbox": sandbox}
    kinds = itertools.cycle(("function", EVALUATORS["function"]))
    parts = [
        {"strategy": kind, "config": {"function": name, **own}}
        for kind, name in zip(kinds, functions, strict=False)
    ]
    return {"evaluator": {"strategy": "composite", "config": {"parts": parts}}}


@pytest.mark.parametrize("asked", [None, False, True])
def test_a_scoring_function_runs_in_a_sandbox_unless_it_is_trusted(asked):
    permits = SubmissionPolicy(import_paths=("mine",), trusted=("mine.own:score",))
    functions = ("mine:score", "mine:other", "mine.own:score")
    task = Task.model_validate(BASE | scored(*functions, sandbox=asked))
    assert list(permits.refused(task)) == []
    parts = permits.crossed(task).evaluator.config["parts"]
    assert [part["config"]["sandbox"] for part in parts] == [True, True, bool(asked)]
    alone = task.evaluator.model_copy(
        update={
            "strategy": "bridle.evaluators.function:FunctionEvaluator",
            "config": {"function": "mine:score", "sandbox": False},
        }
    )
    crossed = permits.crossed(task.model_copy(update={"evaluator": alone}))
    assert crossed.evaluator.config["sandbox"] is True


@pytest.mark.parametrize(
    "evaluator",
    [
        {"strategy": "function", "config": {"function": "mine:score"}},
        {"strategy": "mine:Evaluator"},
        scored("other:score", "mine:score")["evaluator"],
    ],
)
def test_task_sets_no_variable_of_an_evaluator_on_the_server(evaluator):
    """`PYTHONPATH=.` there, beside the files of the task, was code on the server."""
    env = {"evaluator": evaluator | {"env": {"PYTHONPATH": "."}}}
    trusting = SubmissionPolicy(trusted=("mine",), import_paths=("other",))
    assert list(refused(trusting, **env)) == ["evaluator.env.PYTHONPATH"]


def test_variables_of_an_evaluator_that_runs_in_a_sandbox_pass():
    env = {"env": {"PYTHONPATH": "."}}
    command = {"strategy": "command", "config": {"command": "true"}}
    inside = SubmissionPolicy(import_paths=("mine",))
    assert refused(inside, evaluator=command | env) == {}
    assert refused(inside, evaluator=scored("mine:score")["evaluator"] | env) == {}


# ---- every field is listed


def leaves(model, prefix=""):
    """The patterns of all fields of a model, and of the models in it."""
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        if inner is None:
            yield prefix + name
        else:
            many = "[]" if get_origin(field.annotation) is tuple else ""
            yield from leaves(inner, f"{prefix}{name}{many}.")


def model_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(model_in, get_args(annotation))), None)


def test_every_field_of_a_task_is_listed_as_inside_or_has_a_rule():
    """A new field is refused until `INSIDE` or `RULES` of `submission_policy` names it."""
    listed = [*INSIDE, *RULES]
    assert sorted(leaves(Task)) == sorted(listed)
    assert set(GroupOptions.model_fields) == {
        *("dispatch_priority", "callback_url", "early_stop_min_usable_sessions", "max_refills"),
        *("min_completed_fraction", "max_attempts", "retry_backoff_s", "hand_out"),
    }, "of these only callback_url leaves the server: `addresses` judges it"


def settings_of(path):
    """The settings class in the module of a harness or evaluator; `Settings` if it takes none."""
    module, _, name = path.partition(":")
    if name in {"CommandHarness", "Empty"}:
        return Settings
    found = [
        one
        for one in vars(importlib.import_module(module)).values()
        if isinstance(one, type) and issubclass(one, Settings) and one.__module__ == module
    ]
    own = f"{name.removesuffix('Evaluator')}Settings"
    return max(found, key=lambda one: (one.__name__ == own, "Settings" in one.__name__))


def submittable(path):
    """The settings that a submitted task may give to a harness, an evaluator or a runtime."""
    module, _, name = path.partition(":")
    words = vars(getattr(importlib.import_module(module), name)).get("submittable", "")
    return {word.partition(":")[0] for word in words.split()}


@pytest.mark.parametrize("table", [HARNESSES | CHECKS, EVALUATORS])
def test_every_setting_of_a_harness_and_an_evaluator_is_listed(table):
    for name, path in table.items():
        assert submittable(path) == set(settings_of(path).model_fields), name


def test_every_kwarg_of_a_runtime_is_listed():
    assert {name: submittable(path) for name, path in RUNTIMES.items()} == {
        "docker": docker.KWARGS,
        "apptainer": apptainer.KWARGS,
        "remote": set(remote.RemoteSettings.model_fields),
        "bubblewrap": bubblewrap.KWARGS,
        "local": set(),
    }


def test_every_rule_of_a_listed_setting_exists():
    for place, table in (
        ("agent.settings", HARNESSES | CHECKS),
        ("evaluator.config", EVALUATORS),
        ("runtime.kwargs", RUNTIMES),
    ):
        model, _, field = place.partition(".")
        key = {"agent": "harness", "evaluator": "strategy", "runtime": "backend"}[model]
        for name, path in table.items():
            given = dict.fromkeys(submittable(path), "x")
            found = refused(SubmissionPolicy(), **{model: {key: name, field: given}})
            assert "has no such field" not in " ".join(found.values()), name


@pytest.mark.parametrize("name", ["command", "bridle.harnesses.command:CommandHarness"])
def test_a_class_that_lists_nothing_takes_no_setting_of_a_submitted_task(name):
    agent = {"import_path" if ":" in name else "harness": name, "settings": {"new": 1}}
    message = refused(SubmissionPolicy(), agent=agent)["agent.settings.new"]
    assert message == "'command' has no such field; it has: none"


def test_paths_are_resolved_before_they_are_compared_with_listed_folders(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    permits = SubmissionPolicy(host_paths=(tmp_path / "in",))
    for given, ok in ((".", True), ("deep/er", True), ("..", False), ("link/x", False)):
        task = {
            "task_dir": str(tmp_path / "in"),
            **runtime(prepare=[{"type": "upload_file", "source": given, "target": "x"}]),
        }
        assert (refused(permits, **task) == {}) is ok, given


def test_module_with_py_in_its_name_is_not_a_file(tmp_path):
    """`runs.py:b./x:go` was judged as a file in a listed folder, and copied the package `runs`."""
    permits = SubmissionPolicy(host_paths=(tmp_path,))
    for given, ok in (("a.py:go", True), ("runs.py:b./x:go", False), ("a.py:b:go", False)):
        task = {"task_dir": str(tmp_path), "agent": {"harness": "function", "function": given}}
        assert (refused(permits, **task) == {}) is ok, given


def test_remote_host_must_match_the_operators_list():
    listed = {"deployment": {"type": "modal", "image": "*"}, "gateway": "http://us:1"}
    permits = SubmissionPolicy(remotes=(listed,))
    for change, ok in (
        ({"image": "python:3.12"}, True),
        ({"image": "x", "type": "docker"}, False),
        ({"image": "x", "docker_args": ["-v", "/:/host"]}, False),
    ):
        kwargs = listed | {"deployment": {"type": "modal", **change}}
        assert (refused(permits, **runtime(backend="remote", kwargs=kwargs)) == {}) is ok, change
    elsewhere = listed | {"gateway": "http://elsewhere"}
    assert "runtime.kwargs" in refused(permits, **runtime(backend="remote", kwargs=elsewhere))
    assert "runtime.kwargs" in refused(permits, **runtime(backend="remote"))


def test_local_runtime_needs_the_operators_permission():
    local = runtime(backend="local")
    assert refused(SubmissionPolicy(local=True), **local) == {}
    assert refused(SubmissionPolicy(runtimes=("local",)), **local) == {}
    message = refused(SubmissionPolicy(runtimes=("docker",), local=True), **local)[
        "runtime.backend"
    ]
    assert message == "runtime 'local' is not permitted; permitted: docker"


def test_task_without_a_runtime_is_checked_with_the_default_one():
    from bridle.runtimes import default_backend

    backend, _ = default_backend()
    auto = {"runtime": {"backend": "auto"}}
    assert refused(SubmissionPolicy(runtimes=(backend,)), **auto) == {}
    assert "runtime.backend" in refused(SubmissionPolicy(runtimes=("podman",)), **auto)


def test_a_task_without_a_runtime_gets_a_sandbox_unless_local_is_permitted(monkeypatch, tmp_path):
    from bridle import runtimes

    monkeypatch.setenv("PATH", str(tmp_path))  # the server's machine has no bubblewrap, nodes have
    monkeypatch.delenv(runtimes.VARIABLE, raising=False)
    task = Task.model_validate(BASE | runtime(backend="auto"))
    for permits, backend in (
        (SubmissionPolicy(), "bubblewrap"),
        (SubmissionPolicy(runtimes=("bubblewrap",), local=True), "bubblewrap"),
        (SubmissionPolicy(local=True), "auto"),
    ):
        assert list(permits.refused(task)) == []
        assert permits.crossed(task).runtime.backend == backend
    with_image = task.model_copy(update={"runtime": task.runtime.model_copy(update={"gpus": 1})})
    assert SubmissionPolicy().crossed(with_image).runtime.backend == "docker"


def test_submission_policy_leaves_an_unknown_runtime_to_the_runtime_check():
    assert refused(SubmissionPolicy(), **runtime(backend="nope")) == {}


def test_only_tasks_that_upload_files_or_use_harbor_name_files():
    plain = Task.model_validate(BASE | {"task_dir": "/somewhere"})
    assert not names_files(plain)
    steps = [{"type": "upload_file", "source": "a.txt", "target": "a.txt"}]
    assert names_files(Task.model_validate(BASE | runtime(prepare=steps)))
    assert names_files(Task.model_validate(BASE | {"evaluator": {"strategy": "harbor"}}))


@pytest.mark.parametrize(
    ("bind", "is_taken"), [(":/inside", True), ("", True), (":inside", False), (":/a:rw", False)]
)
def test_bind_may_have_another_path_in_the_sandbox(tmp_path, bind, is_taken):
    permits = SubmissionPolicy(host_paths=(tmp_path,))
    found = refused(permits, **runtime(kwargs={"binds": [f"{tmp_path}{bind}"]}))
    assert list(found) == ([] if is_taken else ["runtime.kwargs.binds"])
