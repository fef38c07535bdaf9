"""What a worker is told; that it serves is seen in `test_gateway`."""

from types import SimpleNamespace

import orjson

from bridle.cli.config import FileConfig, load_config
from bridle.cli.gateway_worker import told
from bridle.config import ModelSpec
from bridle.types import Kind

FRONT = SimpleNamespace(url="http://g:1", own_url="http://127.0.0.1:1", control_token="t" * 20)


def test_a_worker_reads_the_same_config_with_a_place_of_its_own(tmp_path):
    config = load_config(
        None,
        engines=["http://e:1"],
        tokenizer="builtin",
        gateway={"port": 8100, "control_port": 8101, "stream": "live", "data_dir": tmp_path},
    )
    config = config.model_copy(update={"models": {"judge": ModelSpec(kinds=(Kind.SIDE,))}})

    spec = orjson.loads(told(config, tmp_path / "worker-1", FRONT, fsync=True))  # type: ignore[arg-type]

    read = FileConfig.model_validate(spec["config"])
    assert (read.engines, read.tokenizer) == (config.engines, config.tokenizer)
    assert read.models == config.models
    assert read.gateway.stream == "live"
    assert (read.gateway.host, read.gateway.port, read.gateway.control_port) == (
        "127.0.0.1",
        0,
        None,
    )
    assert (read.gateway.public_url, read.gateway.control_token) == (FRONT.url, "t" * 20)
    assert (spec["front"], spec["fsync"]) == (FRONT.own_url, True)
    assert (tmp_path / "worker-1").is_dir()
