import json
import os
import shutil
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import builtin_tokenizer_dir
from bridle.errors import ConfigError, EngineError, RenderError
from bridle.scripted.tokenizer import TextStream, load_tokenizer, text_of

TOKENIZER = load_tokenizer("builtin")
printable = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture
def folder(tmp_path):
    """A copy of the shipped tokenizer, to be damaged."""
    return shutil.copytree(builtin_tokenizer_dir(), tmp_path / "tokenizer")


@given(printable)
def test_text_survives_encoding_and_decoding(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_tokenizer_none_and_builtin_load_the_shipped_tokenizer():
    assert (
        load_tokenizer(None).folder == load_tokenizer("builtin").folder == builtin_tokenizer_dir()
    )


def test_each_special_token_is_encoded_as_one_id():
    assert TOKENIZER.encode("<|im_end|>").tolist() == [TOKENIZER.end_id]
    assert TOKENIZER.id_of("<think>") is not None
    assert TOKENIZER.id_of("no such token") is None
    assert TOKENIZER.encode("<|im_end|>").max() < TOKENIZER.vocab_size


def test_visible_text_has_no_special_tokens_but_the_familys_markers():
    ids = TOKENIZER.encode("<think>\nhm\n</think>\n\nhi<|im_end|>")
    assert TOKENIZER.visible(ids) == "<think>\nhm\n</think>\n\nhi"


def test_think_markers_stay_visible_when_the_tokenizer_marks_them_as_special(folder):
    path = folder / "tokenizer.json"
    read = json.loads(path.read_text())
    for token in read["added_tokens"]:
        token["special"] = True
    path.write_text(json.dumps(read))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.visible(tokenizer.encode("<think>hm<|im_end|>")) == "<think>hm"


@given(printable, st.integers(1, 4))
def test_a_text_stream_emits_whole_characters_and_loses_none(text, size):
    ids = TOKENIZER.encode(text)
    stream = TextStream(TOKENIZER)
    pieces = [stream.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join([*pieces, stream.finish()]) == TOKENIZER.visible(ids)


def test_a_text_stream_that_ends_inside_a_character_emits_a_replacement_character():
    ids = TOKENIZER.encode("\N{PARTY POPPER}")
    stream = TextStream(TOKENIZER)
    assert stream.feed(ids[:-1]) == ""
    assert set(stream.finish()) == {"\ufffd"}


def test_messages_are_rendered_by_the_tokenizer_folder_s_chat_template():
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    text = TOKENIZER.render(
        [
            {"role": "developer", "content": parts},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "reasoning": "hm",
             "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}]},
            {"role": "tool", "content": "ok"},
        ],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    )  # fmt: skip
    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n\n")
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<think>\nhm\n</think>" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_chat_template_arguments_are_passed_to_the_template():
    text = TOKENIZER.render(
        [{"role": "user", "content": "hi"}], None, arguments={"enable_thinking": False}
    )
    assert text.endswith("<think>\n\n</think>\n\n")


def test_malformed_tool_call_arguments_are_passed_to_the_template_unchanged():
    call = {"function": {"name": "f", "arguments": '{"a":'}}
    text = TOKENIZER.render([{"role": "assistant", "content": "", "tool_calls": [call]}], None)
    assert '"arguments": {"a":}' in text


def test_an_error_raised_by_the_chat_template_is_a_render_error():
    with pytest.raises(RenderError, match="knows no role judge"):
        TOKENIZER.render([{"role": "judge", "content": "x"}], None)


def test_rendering_without_a_chat_template_raises_a_render_error(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RenderError, match="no chat template"):
        load_tokenizer(str(folder)).render([{"role": "user", "content": "x"}], None)


def test_tojson_in_a_chat_template_takes_the_arguments_of_transformers(folder):
    (folder / "chat_template.jinja").write_text("{{ tools | tojson(true, indent=1) }}")
    text = load_tokenizer(folder).render([], [{"type": "é"}])
    assert text == json.dumps([{"type": "é"}], indent=1)


def test_a_chat_template_is_read_from_tokenizer_config_json(folder):
    (folder / "chat_template.jinja").unlink()
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ strftime_now('%Y') }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(str(folder)).render([], None).isdigit()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json: "),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("chat_template.jinja", "{% if", "chat template"),
    ],
)
def test_a_tokenizer_folder_with_a_broken_file_is_refused_with_its_name(
    folder, name, content, says
):
    (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=says):
        load_tokenizer(str(folder))


def test_missing_tokenizer_folders_and_files_are_reported(folder, tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(str(folder))


def test_the_family_s_end_token_is_used_without_a_tokenizer_config(folder):
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(str(folder)).end_id == TOKENIZER.end_id


def test_a_vocabulary_without_an_end_token_is_refused(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", "<|other|>"))
    with pytest.raises(ConfigError, match="eos_token"):
        load_tokenizer(str(folder))


def test_the_text_of_message_content_joins_its_text_parts():
    assert text_of("a") == "a"
    assert text_of([{"type": "text", "text": "a"}, {"type": "image"}, {"text": "b"}]) == "ab"
    assert text_of(None) == ""


def test_encoded_token_ids_are_int32():
    assert TOKENIZER.encode("abc").dtype == np.int32


def test_a_loaded_tokenizer_is_cached_until_its_folder_changes(folder):
    path = folder / "tokenizer.json"
    content, changed_at = path.read_text(), path.stat().st_mtime_ns
    first = load_tokenizer(str(folder))
    tracemalloc.start()
    try:
        kept = [load_tokenizer(str(folder)) for _ in range(20)]
        assert tracemalloc.get_traced_memory()[0] < 200_000, "1.1 MB with templates of their own"
    finally:
        tracemalloc.stop()
    path.write_text("not read again")
    os.utime(path, ns=(changed_at, changed_at))
    kept.append(load_tokenizer(str(folder)))
    assert {one.encode("some words").tobytes() for one in (first, *kept)} == {
        first.encode("some words").tobytes()
    }
    path.write_text(content.replace("<|im_end|>", "<|end_im|>"))
    os.utime(path, ns=(1, 1))
    with pytest.raises(ConfigError, match="eos_token"):
        load_tokenizer(str(folder))


def test_messages_that_the_chat_template_refuses_give_400(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(EngineError, match="refuses these messages") as failed:
        load_tokenizer(str(folder)).prompt_ids([], None, {})
    assert failed.value.status == 400
