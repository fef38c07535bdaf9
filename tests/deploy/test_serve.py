"""The script that keeps a server up, with a `ray` and a `bridle` of a few lines."""

import signal
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "serve.sh"


@pytest.fixture
def serve(script, tmp_path):
    """Runs the script, with `$AT` as a folder of the test's."""

    def run(bridle, ray="exit 0", programs=(), **env):
        programs = {"bridle": bridle, "ray": ray} | dict(programs)
        return script(SCRIPT, programs, AT=str(tmp_path), BRIDLE_RESTART_S="0", **env)

    return run


COUNT = 'echo x >> "$AT/runs"; n=$(wc -l < "$AT/runs")'


DRAINS = (
    "trap 'echo drained; kill $!; exit 0' TERM; sleep 30 >/dev/null 2>&1 & touch \"$AT/up\"; wait"
)


def end_when_up(process, up):
    while not up.exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)


def test_the_serve_script_restarts_a_killed_server(serve, tmp_path):
    process = serve(f"{COUNT}; [ $n = 3 ] && exit 0; kill -9 $$")
    _, err = process.communicate(timeout=45)
    assert process.returncode == 0
    assert len((tmp_path / "runs").read_text().split()) == 3
    assert err.count("ended with code 137; it is started again") == 2


def test_the_serve_script_restarts_no_server_after_sigterm(serve, tmp_path):
    process = serve(f"trap '' TERM; {COUNT}; [ $n = 2 ] && exit 0; kill -TERM $PPID; exit 1")
    process.communicate(timeout=45)
    assert (process.returncode, (tmp_path / "runs").read_text()) == (1, "x\n")


def test_the_serve_script_exits_with_0_when_the_server_drains_before_the_next_wait(
    serve, tmp_path, ended_first
):
    process = serve(DRAINS, **ended_first("server"))
    end_when_up(process, tmp_path / "up")
    out, _ = process.communicate(timeout=45)
    assert (process.returncode, out) == (0, "drained\n")


def test_the_serve_script_survives_signals_at_any_moment(serve, often_signalled):
    bridle, sleep, signal_often = often_signalled
    process = serve(bridle, programs=sleep)
    signal_often(process)
    out, err = process.communicate(timeout=45)
    assert (process.returncode, out, err) == (3, "", "")


def test_sigterm_ends_the_serve_script_while_waiting_for_ray(serve, tmp_path):
    process = serve("exit 0", ray='touch "$AT/up"; exit 1')
    end_when_up(process, tmp_path / "up")
    out, err = process.communicate(timeout=45)
    assert (process.returncode, out, err) == (0, "", "")


def test_the_serve_script_does_not_restart_a_server_that_exits_with_code_2(serve, tmp_path):
    process = serve(f"{COUNT}; exit 2")
    process.communicate(timeout=45)
    assert (process.returncode, (tmp_path / "runs").read_text()) == (2, "x\n")


def test_the_serve_script_waits_for_ray_and_passes_config_database_and_tokenizer(serve, tmp_path):
    ray = '[ -e "$AT/asked" ] && exit 0; touch "$AT/asked"; exit 1'
    env = {
        "BRIDLE_CONFIG": "b.toml",
        "BRIDLE_DATABASE": "postgresql://db/x y",
        "BRIDLE_TOKENIZER": "a b",
    }
    process = serve('test -e "$AT/asked"; echo $? "$RAY_ADDRESS" "$@"', ray=ray, **env)
    out, _ = process.communicate(timeout=45)
    result = "serve --config b.toml --database postgresql://db/x y --tokenizer a b"
    assert out == f"0 127.0.0.1:6379 {result}\n"


def test_the_serve_script_lets_the_server_drain_after_sigterm(serve, tmp_path):
    process = serve(DRAINS)
    end_when_up(process, tmp_path / "up")
    out, _ = process.communicate(timeout=45)
    assert (process.returncode, out) == (0, "drained\n")
