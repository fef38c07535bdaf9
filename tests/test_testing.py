import pytest

from bridle.engines.base import GenerateRequest
from bridle.engines.ids import ArrayIds
from bridle.errors import ConfigError
from bridle.scripted.tokenizer import load_tokenizer
from bridle.testing import scripted_engine
from bridle.types import Sampling

TOKENIZER = load_tokenizer(None)


def request(text="hi", **fields):
    return GenerateRequest("r", ArrayIds(TOKENIZER.encode(text)), Sampling(), **fields)


async def test_scripted_conversations_are_matched_before_the_default_turns():
    engine = scripted_engine(
        [{"content": "rest"}],
        conversations=[{"when": {"user_contains": "special"}, "turns": [{"content": "special"}]}],
        model="m",
    )
    (chunk,) = [one async for one in engine.generate(request("special"))]
    assert TOKENIZER.visible(chunk.output_ids) == "special"
    assert (await engine.start()).model == "m"
    with pytest.raises(ConfigError, match=r"script: conversations\.0\.turns\.0\.contents"):
        scripted_engine([{"contents": "typo"}])
