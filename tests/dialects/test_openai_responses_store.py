import json

import pytest

from bridle.dialects.openai_responses_write import deleted_json, items_page
from bridle.errors import RequestError

SPANS = (
    b'{"role":"user","content":"hi"}',
    b'{"type":"reasoning","id":"rs_1","summary":[]},{"role":"assistant","content":"ok"}',
    b'{"type":"function_call_output","call_id":"c","output":"r"}',
)


def page(query="order=asc"):
    return json.loads(items_page(SPANS, query))


def test_items_have_ids_types_and_parts():
    user, thought, said, result = page()["data"]
    assert user["content"] == [{"type": "input_text", "text": "hi"}]
    assert said["content"][0] == {"type": "output_text", "text": "ok", "annotations": []}
    assert thought == {"type": "reasoning", "id": "rs_1", "summary": []}
    assert result["id"].startswith("fco_")
    assert result["status"] == user["status"] == "completed"
    assert len({item["id"] for item in page()["data"]}) == 4
    assert page() == page(), "ids are the same each time"


def test_the_newest_item_is_first_unless_asked_otherwise():
    assert page("")["data"] == page()["data"][::-1]
    found = page("limit=2")
    assert (len(found["data"]), found["has_more"]) == (2, True)
    assert (found["first_id"], found["last_id"]) == tuple(item["id"] for item in found["data"])


def test_an_empty_page_has_no_ends():
    last = page()["data"][-1]["id"]
    found = page(f"order=asc&after={last}")
    assert found == {
        "object": "list",
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "limit=-1", "limit=²", "order=up", "after=nothing"]
)
def test_what_cannot_be_asked_is_named(query):
    with pytest.raises(RequestError) as told:
        page(query)
    assert told.value.param == query.partition("=")[0]


def test_a_deletion_is_confirmed():
    assert json.loads(deleted_json("resp_1"))["deleted"] is True
