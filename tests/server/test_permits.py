import pytest

from bridle.config import Task
from bridle.server.permits import Permits, names_files

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
            "agent.settings.python",
            {
                "agent": {
                    "harness": "function",
                    "settings": {"python": "/bin/sh"},
                }
            },
        ),
        ("agent.skills_path", {"agent": {"harness": "codex", "skills_path": "skills"}}),
        ("task_dir", {"task_dir": "/srv/tasks"}),
        ("builder.strategy", {"builder": {"strategy": "mine:build"}}),
        ("evaluator.strategy", {"evaluator": {"strategy": "mine:Evaluator"}}),
        ("evaluator.config.tests", {"evaluator": {"strategy": "harbor"}}),
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
def test_what_the_operator_does_not_list_is_refused_by_its_fields_name(field, changes):
    assert field in refused(Permits(), **changes)


def test_a_plain_task_is_permitted():
    assert refused(Permits()) == {}


def test_listed_imports_pass_and_their_neighbours_do_not():
    permits = Permits(import_paths=("mine", "other.module:Class"))
    for name, ok in (
        ("mine:A", True),
        ("mine.deep:A", True),
        ("miner:A", False),
        ("other.module:Class", True),
        ("other.module:Else", False),
    ):
        assert (refused(permits, agent={"import_path": name}) == {}) is ok, name


def test_paths_lie_in_listed_folders_also_by_way_of_links_and_dots(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    permits = Permits(host_paths=(tmp_path / "in",))
    for given, ok in ((".", True), ("deep/er", True), ("..", False), ("link/x", False)):
        task = {
            "task_dir": str(tmp_path / "in"),
            **runtime(prepare=[{"type": "upload_file", "source": given, "target": "x"}]),
        }
        assert (refused(permits, **task) == {}) is ok, given


def test_a_remote_host_is_as_the_operator_lists_it():
    listed = {"deployment": {"type": "modal", "image": "*"}, "gateway": "http://us:1"}
    permits = Permits(remotes=(listed,))
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


def test_local_runs_only_where_the_operator_wants_it():
    local = runtime(backend="local")
    assert refused(Permits(local=True), **local) == {}
    assert refused(Permits(runtimes=("local",)), **local) == {}
    message = refused(Permits(runtimes=("docker",), local=True), **local)["runtime.backend"]
    assert message == "runtime 'local' is not permitted; permitted: docker"


def test_a_task_that_names_no_runtime_is_judged_by_the_one_it_gets():
    from bridle.runtimes import default_backend

    backend, _ = default_backend()
    auto = {"runtime": {"backend": "auto"}}
    assert refused(Permits(runtimes=(backend,)), **auto) == {}
    assert "runtime.backend" in refused(Permits(runtimes=("podman",)), **auto)


def test_an_unknown_runtime_is_left_to_whoever_knows_them():
    assert refused(Permits(), **runtime(backend="nope")) == {}


def test_a_task_folder_matters_only_to_tasks_that_name_files():
    plain = Task.model_validate(BASE | {"task_dir": "/somewhere"})
    assert not names_files(plain)
    steps = [{"type": "upload_file", "source": "a.txt", "target": "a.txt"}]
    assert names_files(Task.model_validate(BASE | runtime(prepare=steps)))
    assert names_files(Task.model_validate(BASE | {"evaluator": {"strategy": "harbor"}}))
