"""The settings of a worker; that it serves is seen in `test_gateway`."""

from bridle.cli.config import load_config
from bridle.cli.gateway_worker import config_of
from bridle.config import ModelSpec
from bridle.types import Kind


def test_a_worker_has_the_settings_of_the_gateway_but_for_its_own(tmp_path):
    config = load_config(
        None,
        engines=["http://e:1"],
        tokenizer="builtin",
        gateway={"port": 8100, "control_port": None, "stream": "live", "data_dir": tmp_path},
    )
    config = config.model_copy(update={"models": {"judge": ModelSpec(kinds=(Kind.SIDE,))}})
    own = {"port": 8102, "control_port": 4711, "control_token": "t" * 20, "data_dir": "worker-1"}

    read = config_of({"config": config.model_dump(mode="json", exclude_unset=True), "gateway": own})

    assert (read.engines, read.tokenizer) == (config.engines, config.tokenizer)
    assert read.models == config.models
    assert read.gateway.stream == "live"
    assert read.gateway.model_dump(include=set(own), mode="json") == own
