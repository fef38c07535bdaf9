"""Settings of a gateway."""

import pytest
from pydantic import ValidationError

from bridle.gateway.settings import GatewaySettings


def test_the_defaults_are_those_promised_and_listen_on_loopback_only():
    settings = GatewaySettings()
    assert (settings.host, settings.port, settings.control_port) == ("127.0.0.1", 0, None)
    assert settings.retry_grace_s == 10
    assert settings.headers_after_s == 10
    assert settings.min_output_tokens == 64
    assert not settings.allow_untokenized


@pytest.mark.parametrize(
    "wrong",
    [
        *({"port": 70_000}, {"retry_grace_s": -1}, {"control_token": "short"}, {"keepalives": 1}),
        *({"public_url": "gateway:8100"}, {"public_url": "http://"}),
    ],
)
def test_a_wrong_setting_is_refused(wrong):
    with pytest.raises(ValidationError):
        GatewaySettings(**wrong)


def test_the_control_token_is_not_shown():
    assert "secret" not in repr(GatewaySettings(control_token="secret-secret-secret"))
