"""The table of docs/reference/families.md: where a family's bridge is its whole rendering.

For each family and step the conversation is rendered whole; then the prompt before its last turn is
extended by that turn, with the ids that the whole shows, and by what is new.

    python -m tests.prompting.families > docs/reference/families.md
"""

import sys
from functools import cache
from importlib.metadata import version

from tests.prompting.conftest import with_tokens_of

from bridle.prompting.family import PROBES, family_names, make_family

UNTRIED = {"gpt-oss": "its vocabulary is downloaded by a library of its own"}
TOOLS = next(tools for _, _, tools in PROBES if tools)
CALLED, RESULT = PROBES[5][1][2:]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello there"}
MORE = {"role": "user", "content": "Go on, please"}
TOLD = {"role": "assistant", "content": "Hi."}
OTHER = {
    **CALLED["tool_calls"][0],
    "id": "call_2",
    "function": {"name": "look", "arguments": {"path": "b.txt"}},
}
BOTH = {**CALLED, "tool_calls": [CALLED["tool_calls"][0], OTHER]}
SECOND = {**RESULT, "tool_call_id": "call_2"}


def thinking(turn):
    """The same turn, after reasoning."""
    return {**turn, "reasoning_content": "I wonder."}


STEPS = {
    "answer, user": ([SYSTEM, USER], TOLD, [MORE]),
    "call, result": ([SYSTEM, USER], CALLED, [RESULT]),
    "two calls, two results": ([SYSTEM, USER], BOTH, [RESULT, SECOND]),
    "reasoning, call, result": ([SYSTEM, USER], thinking(CALLED), [RESULT]),
    "reasoning, answer, user": ([SYSTEM, USER], thinking(TOLD), [MORE]),
    "after a loop, user": ([USER, thinking(CALLED), RESULT], thinking(TOLD), [MORE]),
}
"""What comes before a turn, the turn, and what is new after it."""

SAME = "="
OPENING = "opening"
DROPPED = "drops"
REFUSED = "refuses"
UNRENDERED = "not rendered"

HEAD = """# Families

With `history = "exact"` Bridle extends a prompt: it keeps the sampled ids and appends the new
messages. The table compares this extension with the ids that the family's template renders for the
whole conversation. Where the two differ, a trainer that renders conversations anew trains on other
ids than those that the engine sampled from. Families come from `renderers` {version}; each got the
shipped tokenizer with the control tokens that it asks for.

- `=` means that Bridle's extension and the template's whole rendering give the same ids.
- `opening`: the prompt opens a thinking block for the reply; the whole rendering omits the block.
- `drops`: once a message follows, the whole rendering omits or changes reasoning; the number counts
  the last ids of the prompt that this changes. The extension keeps the reasoning.
- `a/b`: the whole rendering ends with `a` ids where the extension has `b` other ones.
- `refuses`: the family cannot extend here; Bridle extends by a difference of the model's template.
- `not rendered`: the family's template cannot render this conversation.

`gpt-oss` is not measured: {untried}.

"""


def compared(family, step):
    """`SAME`, or what is different."""
    before, turn, new = STEPS[step]
    try:
        prompt = family.render_ids(before, tools=TOOLS, add_generation_prompt=True)
        whole = family.render_ids([*before, turn, *new], tools=TOOLS, add_generation_prompt=True)
    except ValueError:
        return UNRENDERED
    differ = len(prompt) - same(prompt, whole)
    if differ:
        return OPENING if differ <= HEADER else f"{DROPPED} {differ}"
    stops = set(family.get_stop_token_ids())
    rest = whole[len(prompt) :]
    end = next(place for place, one in enumerate(rest) if one in stops)
    bridged = family.bridge_to_next_turn(prompt, rest[: end + 1], new, tools=TOOLS)
    if bridged is None:
        return REFUSED
    ids = bridged.token_ids
    at = same(ids, whole)
    return SAME if ids == whole else f"{len(whole) - at}/{len(ids) - at}"


HEADER = 2
"""Ids at the end of a prompt that open a thinking block."""


def same(one, other):
    """Return how many leading ids are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


@cache
def rows():
    """Family -> step -> what `compared` says."""
    found = {}
    for name in family_names():
        if name in UNTRIED:
            continue
        tokenizer, _ = with_tokens_of(name)
        family = make_family(name, tokenizer, thinking=None, history="exact")
        found[name] = {step: compared(family, step) for step in STEPS}
    return found


def page():
    """The whole page."""
    head = HEAD.format(version=version("renderers"), untried=UNTRIED["gpt-oss"])
    lines = [f"| family | {' | '.join(STEPS)} |", "|---" * (1 + len(STEPS)) + "|"]
    lines += [f"| {name} | {' | '.join(row.values())} |" for name, row in rows().items()]
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
