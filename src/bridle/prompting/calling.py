"""A grammar under which a model must call a tool, in the form of its own chat template.

Engines have grammars for required calls of their own, in a form that no template writes, so that
neither the model's training nor our parser knows it. This one is an xgrammar structural tag, as
vLLM takes it: whatever the model wants to think or say, then at least one call of the family's own
shape, whose arguments meet the tool's schema. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from bridle.types import JSON, ToolSpec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

FAMILIES: Final = frozenset({"qwen3", "prime-qwen3", "qwen3-vl"})
"""Families, and the tool parser of templates like theirs, that write a call as one JSON object with
`name` and `arguments` between `<tool_call>` and `</tool_call>`, each on a line of its own."""


def call_grammar(form: str | None, tools: Sequence[ToolSpec], choice: str) -> JSON | None:
    """A structural tag for `choice` (`required`, or a tool's name); `None` = no such form is known.

    `form` is the family's name, or that of the tool parser where there is no family.
    """
    offered = [tool for tool in tools if choice in ("required", tool.name)]
    if form not in FAMILIES or not offered:
        return None
    calls = {
        "type": "triggered_tags",
        "triggers": [_OPEN],
        "tags": [_tag(tool) for tool in offered],
        "at_least_one": True,
        "stop_after_first": False,
    }
    said = {"type": "any_text", "excludes": [_OPEN]}
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": [said, calls]}}


def _tag(tool: ToolSpec) -> JSON:
    name = json.dumps(tool.name, ensure_ascii=False)
    schema = tool.parameters or {"type": "object"}
    return {
        "type": "tag",
        "begin": f'{_OPEN}\n{{"name": {name}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": f"}}\n{_CLOSE}",
    }
