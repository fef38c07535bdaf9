"""The official npm SDKs over loopback: what they read is what was scripted and captured.

One script per SDK (in `npm/`) asks a real gateway for everything that its users ask for and prints
what it received; here that is compared with the engine's script and with the capture.
"""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from tests.gateway.house import house
from tests.gateway.oracle import (
    AGAIN,
    CUT,
    HELLO,
    IMAGE_REFUSED,
    SHAPED,
    by_id,
    check,
    check_run,
    engine,
)

from bridle.harnesses.bundles import bundles_dir, ensure
from bridle.harnesses.packaged import NODE, node_recipe

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(1800)]

SCRIPTS = Path(__file__).with_name("npm")
SDKS = {"openai": "openai", "anthropic": "anthropic", "google": "google"}
"""Script -> which of a session's base URLs it is given."""


@pytest.fixture(scope="module", params=["whole", "live"])
def leaves(request):
    """Return how streamed replies leave."""
    return request.param


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, leaves):
    """SDK -> what its script printed, and the exchanges that it left, by the reply's id."""
    return asyncio.run(_played(tmp_path_factory, leaves))


async def _played(tmp_path_factory, leaves):
    recipe = node_recipe("sdks", "1", size_mb=290, locks=SCRIPTS)
    bundle = await ensure(recipe, bundles_dir(), print)
    result = {}
    for sdk, api in SDKS.items():
        folder = tmp_path_factory.mktemp(sdk)
        for script in SCRIPTS.glob("*.mjs"):
            shutil.copy(script, folder)
        (folder / "node_modules").symlink_to(bundle / "node_modules")
        async with house(engine=engine(), stream=leaves) as home:
            caller = await home.session()
            where = {
                "URL_OF_API": caller.handle.base_urls[api],
                "KEY": caller.handle.key,
                "HOME": str(folder),
            }
            said = await run_script(bundle / NODE, folder / f"{sdk}.mjs", where)
            result[sdk] = (json.loads(said), by_id(caller.exchanges))
    return result


async def run_script(node: Path, script: Path, env: dict[str, str]) -> bytes:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        str(node), str(script), env=env, stdout=pipe, stderr=pipe
    )
    said, complained = await process.communicate()
    assert process.returncode == 0, complained.decode()
    return said


def api_of(sdk: str, case: str) -> str:
    if sdk != "openai":
        return sdk
    return "responses" if case.startswith("responses") else "chat"


SINGLE = [("create", HELLO), ("stream", HELLO), ("length", CUT), ("length_stream", CUT)]
READ = [(sdk, case, turn) for sdk in SDKS for case, turn in [*SINGLE, ("retried", AGAIN)]]
READ += [("openai", f"responses_{case}", turn) for case, turn in SINGLE]


@pytest.mark.parametrize(("sdk", "case", "turn"), READ)
def test_npm_sdks_read_the_scripted_reply(outcomes, leaves, sdk, case, turn):
    facts, exchanges = outcomes[sdk]
    exchange = check(facts[case], turn, api_of(sdk, case), exchanges)
    assert exchange.extra.get("stream") == (leaves if case.endswith("stream") else None)


RUNS = [(sdk, case) for sdk in SDKS for case in ("tools", "tools_stream")]
RUNS += [("openai", f"responses_{case}") for case in ("tools", "tools_stream")]
RUNS += [("openai", f"responses_{case}") for case in ("previous", "previous_stream")]
RUNS.append(("google", "chat"))


@pytest.mark.parametrize(("sdk", "case"), RUNS)
def test_parallel_tool_calls_of_npm_sdks_are_one_conversation(outcomes, sdk, case):
    facts, exchanges = outcomes[sdk]
    first, second = facts[case]
    check_run(first, second, api_of(sdk, case), exchanges)


@pytest.mark.parametrize(
    ("sdk", "case"), [*((sdk, "structured") for sdk in SDKS), ("openai", "responses_structured")]
)
def test_an_unenforced_response_format_of_npm_sdks_is_recorded(outcomes, sdk, case):
    facts, exchanges = outcomes[sdk]
    exchange = check(facts[case], SHAPED, api_of(sdk, case), exchanges)
    assert (exchange.constrained, exchange.extra["unenforced"]) == (False, ["response_format"])


@pytest.mark.parametrize(
    ("sdk", "case"), [*((sdk, "image") for sdk in SDKS), ("openai", "responses_image")]
)
def test_an_image_from_npm_sdks_is_refused_by_a_text_only_model(outcomes, sdk, case):
    facts, _ = outcomes[sdk]
    assert facts[case]["status"] == 400
    assert IMAGE_REFUSED in facts[case]["message"]


@pytest.mark.parametrize(
    ("sdk", "count"), [("openai", "responses_count"), ("anthropic", "count"), ("google", "count")]
)
def test_token_counts_of_npm_sdks_equal_the_prompt_usage_and_sample_nothing(outcomes, sdk, count):
    facts, exchanges = outcomes[sdk]
    assert facts[count] == facts["create"]["prompt"]
    ids = {one["id"] for case in facts.values() for one in answers(case)}
    assert set(exchanges) == ids


def answers(value):
    """The facts of replies in what a case printed."""
    if isinstance(value, dict):
        return [value] if "id" in value else [one for v in value.values() for one in answers(v)]
    return [one for v in value for one in answers(v)] if isinstance(value, list) else []


def test_npm_sdks_list_models_in_each_provider_s_format(outcomes):
    assert (outcomes["openai"][0]["models"], outcomes["openai"][0]["model"]) == (
        ["scripted"],
        "my-model",
    )
    assert outcomes["anthropic"][0]["models"] == ["scripted"]
    assert outcomes["anthropic"][0]["model"] == "my-model"
    assert outcomes["google"][0]["models"] == ["models/scripted"]
    assert outcomes["google"][0]["model"] == "models/my-model"


def test_a_stored_response_is_read_listed_and_deleted_by_the_openai_sdk(outcomes):
    kept = outcomes["openai"][0]["responses_kept"]
    check(kept["made"], HELLO, "responses", outcomes["openai"][1])
    assert kept["again"] == kept["made"]
    assert kept["items"] == ["hello"]
    assert kept["gone"] == "NotFoundError"


OPENAI_ERRORS = {
    "auth": ("AuthenticationError", 401, "invalid_api_key", None),
    "bad_request": ("BadRequestError", 400, None, None),
    "not_found": ("NotFoundError", 404, "not_found", None),
    "rate_limit": ("RateLimitError", 429, "rate_limit_exceeded", "1"),
    "broken": ("InternalServerError", 500, "server_error", None),
    "overloaded": ("InternalServerError", 503, "server_is_overloaded", "1"),
    "overflow": ("BadRequestError", 400, "context_length_exceeded", None),
}
ONLY_CHAT = {"overflow_stream": OPENAI_ERRORS["overflow"]}
ONLY_RESPONSES = {"previous_unknown": OPENAI_ERRORS["not_found"]}


@pytest.mark.parametrize("prefix", ["", "responses_"])
def test_gateway_errors_are_the_openai_npm_sdk_s_own_error_classes(outcomes, prefix):
    facts, _ = outcomes["openai"]
    expected = {**OPENAI_ERRORS, **(ONLY_RESPONSES if prefix else ONLY_CHAT)}
    read = {case: facts[prefix + case] for case in expected}
    kinds = {c: (f["thrown"], f["status"], f["code"], f["retry_after"]) for c, f in read.items()}
    assert kinds == expected


def test_gateway_errors_are_the_anthropic_npm_sdk_s_own_error_classes(outcomes):
    facts, _ = outcomes["anthropic"]
    expected = {
        "auth": ("AuthenticationError", 401, "authentication_error", None),
        "bad_request": ("BadRequestError", 400, "invalid_request_error", None),
        "not_found": ("NotFoundError", 404, "not_found_error", None),
        "rate_limit": ("RateLimitError", 429, "rate_limit_error", "1"),
        "broken": ("InternalServerError", 500, "api_error", None),
        "overloaded": ("OverloadedError", 529, "overloaded_error", "1"),
        "overflow": ("BadRequestError", 400, "invalid_request_error", None),
        "overflow_stream": ("BadRequestError", 400, "invalid_request_error", None),
    }
    read = {case: facts[case] for case in expected}
    kinds = {c: (f["thrown"], f["status"], f["type"], f["retry_after"]) for c, f in read.items()}
    assert kinds == expected
    assert "prompt is too long: 6010 tokens > 4000 maximum" in facts["overflow"]["message"]


def test_gateway_errors_are_the_google_npm_sdk_s_own_error_statuses(outcomes):
    facts, _ = outcomes["google"]
    expected = {
        "auth": (401, "UNAUTHENTICATED", None),
        "bad_request": (400, "INVALID_ARGUMENT", None),
        "not_found": (404, "NOT_FOUND", None),
        "rate_limit": (429, "RESOURCE_EXHAUSTED", "1s"),
        "broken": (500, "INTERNAL", None),
        "overloaded": (503, "UNAVAILABLE", "1s"),
        "overflow": (400, "INVALID_ARGUMENT", None),
        "overflow_stream": (400, "INVALID_ARGUMENT", None),
    }
    kinds = {}
    for case in expected:
        assert facts[case]["thrown"] == "ApiError"
        error = json.loads(facts[case]["message"])["error"]
        delays = [d["retryDelay"] for d in error.get("details", ()) if "retryDelay" in d]
        kinds[case] = (facts[case]["status"], error["status"], delays[0] if delays else None)
    assert kinds == expected
    assert "input token count (6010) exceeds" in facts["overflow"]["message"]
