import pytest

from bridle.engines.http import EngineClient
from bridle.engines.serving import end_ids, tokenized, tokenizer_dir

FIVE = '{"eos_token_id": 5}'


def test_a_models_folder_is_known_by_its_tokenizer(tmp_path):
    assert tokenizer_dir(str(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_dir(str(tmp_path)) == tmp_path
    assert tokenizer_dir(None) is None


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, ()),
        ({"config.json": FIVE}, (5,)),
        ({"config.json": FIVE, "generation_config.json": '{"eos_token_id": [5, 6]}'}, (5, 6)),
        ({"config.json": FIVE, "generation_config.json": "{broken"}, (5,)),
        ({"config.json": "{}"}, ()),
    ],
)  # fmt: skip
def test_end_tokens_come_from_the_models_own_files(tmp_path, files, found):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert end_ids(tmp_path) == found
    assert end_ids(None) == ()


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ({"tokens": [1, 2]}, [1, 2]),
        ({"tokens": [[1], [2]]}, None),
        ({"tokens": "x"}, None),
        (b"{broken", None),
        (404, None),
    ],
)
async def test_ids_are_asked_for_and_may_be_refused(stub, reply, found):
    server = await stub(tokenize=reply)
    client = EngineClient(server.url, api_key=None, timeout_s=30)
    ids = await tokenized(client, {"prompt": "x"})
    await client.aclose()
    assert (None if ids is None else ids.tolist()) == found
    assert server.bodies == [{"prompt": "x"}]
