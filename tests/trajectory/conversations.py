"""Random sessions for the laws: trees with retries, sub-agents, compaction, abandoned calls."""

import numpy as np
from hypothesis import strategies as st
from tests.capture.made import MadeSession

from bridle.types import DeliveryState, FinishReason, Kind, LogprobMode

STATES = (DeliveryState.DELIVERED,) * 6 + (
    DeliveryState.CUT,
    DeliveryState.ABANDONED,
    DeliveryState.SUPERSEDED,
    None,
)
KINDS = (Kind.AGENT,) * 5 + (Kind.SUBAGENT, Kind.COMPACTION, Kind.SIDE)
MOVES = ("extend",) * 6 + ("root", "retry", "branch", "partial", "fork")


def chain(turns, made=None, **fields):
    """A `MadeSession` of calls that each extend the one before; all have these `fields`."""
    made = made or MadeSession()
    for turn in range(turns):
        made.call(f"x{turn - 1}" if turn else None, **fields)
    return made


@st.composite
def sessions(draw, max_calls=14, drift=False):
    """A `MadeSession` of up to `max_calls` exchanges, in order of capture.

    With `drift` some prompts are a chat template's, that writes sampled turns in its own way.
    """
    made = MadeSession(seed=draw(st.integers(0, 3)), texts=False)
    moves = (*MOVES, *("template",) * 6) if drift else MOVES
    for number in range(draw(st.integers(0, max_calls))):
        _call(draw, made, number, moves)
    if draw(st.booleans()):
        made.end(draw(st.sampled_from([0.0, 1.0, None])))
    return made


def _call(draw, made, number, moves):
    move = draw(st.sampled_from(moves)) if number else "root"
    fields = {
        "output": draw(st.integers(0, 6)),
        "kind": draw(st.sampled_from(KINDS)),
        "state": draw(st.sampled_from(STATES)),
        "finish_reason": draw(st.sampled_from([FinishReason.STOP] * 5 + list(FinishReason))),
        "constrained": draw(st.sampled_from([False] * 5 + [True])),
        "logprob_mode": draw(st.sampled_from([LogprobMode.PROCESSED] * 3 + [LogprobMode.RAW])),
    }
    new = draw(st.integers(1, 5))
    if move == "root":
        made.call(None, new=new, **fields)
        return
    before = draw(st.sampled_from(made.exchanges))
    match move:
        case "extend":
            last = made.exchanges[-1].exchange_id
            made.call(last, new=draw(st.integers(0, 5)), **fields)
        case "branch":
            made.call(before.exchange_id, new=new, **fields)
        case "retry":
            made.call(
                before.parent_id,
                new=before.suffix_ids,
                kept=before.kept,
                continues=before.continues,
                **fields,
            )
        case "partial":
            kept = draw(st.integers(0, len(made.full(before.exchange_id))))
            made.call(before.exchange_id, new=new, kept=kept, **fields)
        case "fork":
            made.call(
                None,
                new=new,
                continues=before.exchange_id,
                root_reason=draw(st.sampled_from(["history_changed", "partial"])),
                **fields,
            )
        case "template":
            shown = made.full(before.exchange_id)
            at = draw(st.integers(0, len(shown)))
            mended = draw(st.integers(0, 2))
            again = np.concatenate([shown[: len(shown) - at], made.ids(mended), shown[-1:]])
            made.call(
                None,
                new=np.concatenate([again if draw(st.booleans()) else shown, made.ids(new)]),
                continues=before.exchange_id,
                root_reason="engine_prompt",
                extra=draw(st.sampled_from([{}, {}, {"drift": "changed"}])),
                **fields,
            )
