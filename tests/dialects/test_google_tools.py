import pytest

from bridle.dialects import DIALECTS
from bridle.dialects.base import Route, RouteKind
from bridle.dialects.google import computer_use, speaks_older
from bridle.dialects.json_reader import encode
from bridle.types import Dialect


def parsed(model, *tools):
    wire = DIALECTS[Dialect.GOOGLE]
    body = {"contents": [{"role": "user", "parts": [{"text": "go"}]}], "tools": list(tools)}
    route = Route(Dialect.GOOGLE, RouteKind.GENERATE, model=model, stream=False)
    return wire.parse(route, encode(body), {})


def names(request):
    return [spec.name for spec in request.tools]


def test_computer_use_is_the_functions_that_its_clients_run():
    tool = {"computerUse": {"environment": "ENVIRONMENT_BROWSER"}}
    newer, older = parsed("policy", tool), parsed("gemini-2.5-computer-use-preview-10-2025", tool)
    assert {"click", "type", "scroll", "hotkey", "take_screenshot"} <= set(names(newer))
    assert {"click_at", "type_text_at", "scroll_document", "wait_5_seconds"} <= set(names(older))
    assert "navigate" in names(newer)
    assert "navigate" in names(older)
    assert newer.extra["removed"] == older.extra["removed"] == {}


def test_excluded_functions_of_computer_use_are_not_shown():
    tool = {"computer_use": {"excluded_predefined_functions": ["navigate", "drag_and_drop"]}}
    shown = names(parsed("m", tool, {"functionDeclarations": [{"name": "own"}]}))
    assert shown[-1] == "own"
    assert not {"navigate", "drag_and_drop"} & set(shown)


def test_a_declared_function_takes_the_place_of_the_predefined_one_of_its_name():
    own = {"name": "navigate", "description": "Mine."}
    request = parsed("m", {"computerUse": {}, "functionDeclarations": [own]})
    assert [spec.description for spec in request.tools if spec.name == "navigate"] == ["Mine."]


def test_the_actions_of_a_mobile_device_are_not_published_and_so_removed():
    request = parsed("m", {"computerUse": {"environment": "ENVIRONMENT_MOBILE"}})
    assert (request.tools, request.extra["removed"]) == ((), {"server_tools": ["computerUse"]})


@pytest.mark.parametrize("older", [True, False])
def test_every_required_argument_of_an_action_is_described(older):
    for spec in computer_use({}, "tools[0].computerUse", older=older) or ():
        assert spec.parameters is not None
        assert set(spec.parameters["required"]) <= spec.parameters["properties"].keys()
        assert spec.description


def test_model_names_tell_which_actions_a_client_knows():
    assert speaks_older("models/gemini-2.5-pro")
    assert speaks_older("gemini-3-flash-preview")
    assert not speaks_older("gemini-3.5-flash")
    assert not speaks_older("policy")
