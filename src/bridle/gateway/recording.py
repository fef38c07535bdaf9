"""A finished call as the facts that capture keeps: only what is new against its parent (law 9)."""

from __future__ import annotations

import time
from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from bridle.capture.records import Exchange
from bridle.dialects.media import block_name
from bridle.dialects.tools import list_digest
from bridle.engines.base import Picture
from bridle.experts import KEY, Experts, merge_rows, pack
from bridle.gateway.budgets import unenforced
from bridle.gateway.call import Answer, Call, Question
from bridle.gateway.engine_prompts import Shown, unplaced
from bridle.gateway.sampling import SampledReply
from bridle.prompting.calls import parsed_object
from bridle.prompting.prompt import PromptIds
from bridle.types import JSON, Message, Reply, Sampling, TextPart, record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


MOST_NAMES: Final = 1000
"""Unknown parts of one request that are recorded by their names."""

NAME_CHARS: Final = 200
"""Of such a name."""


@record()
class Prompted:
    """A prompt and how it came to be."""

    prompt: PromptIds
    parent: Call | None
    """The call whose ids it extends; `None` at a root."""
    root_reason: str | None
    """Reason why it is a root; `None` where it extends."""
    shown: Shown | None = None
    """The messages that the engine renders, because they hold images; `None` = ids do."""
    images: Sequence[JSON] = ()
    """The images of a prompt of ids, as `Shown.images`."""
    pictures: tuple[Picture, ...] = ()
    """The same for the engine."""
    rendered_by: str | None = None
    """Renderer of a root that the engine was to render (`prompt = "engine"`): `engine`, or
    `renderer` for what its template refuses."""
    parted: int = 0
    """Number of texts tokenised by the engine that held what looks like a control token."""
    noise: tuple[str, ...] = ()
    """Named texts in which the request differs from the captured one whose prompt this is."""


@record()
class Finished:
    """All that is known of a call when its reply is whole."""

    call: Call
    question: Question
    prompted: Prompted
    sample: SampledReply
    effective: Sampling
    reply: Reply
    answer: Answer
    """The reply as it is shown."""


def issued_ids(messages: tuple[Message, ...]) -> list[str]:
    """Return every id and signature in a reply that only this gateway can have made."""
    issued: list[str] = []
    for message in messages:
        if message.tool_calls:
            issued += [call.id for call in message.tool_calls if call.id is not None]
        issued += message.issued_ids
    return issued


def exchange_record(finished: Finished, index: int, unpaired: int = 0) -> Exchange:
    """Return the record of a finished call; `index` is its place in the order of commit.

    `unpaired` counts its tool calls without a result that the session's requests did not show
    before.
    """
    call, sample = finished.call, finished.sample
    request = finished.question.request
    prompt, parent = sampled_under(finished.prompted, sample)
    tools = request.tools_span
    span_list = call.spans
    kept = 0 if parent is None else prompt.kept
    return Exchange(
        exchange_id=call.exchange_id,
        session_id=call.session_id,
        index=index,
        dialect=request.dialect,
        kind=call.asked.kind,
        parent_id=None if parent is None else parent.exchange_id,
        continues=call.continues,
        root_reason=_root_reason(finished) if parent is None else None,
        kept=kept,
        suffix_ids=prompt.array() if parent is None else prompt.suffix,
        output_ids=sample.output_ids,
        logprobs=sample.logprobs,
        logprob_mode=finished.question.served.info.logprob_mode,
        versions=sample.versions,
        finish_reason=sample.finish,
        sampling=finished.effective,
        constrained=call.grammar is not None,
        prompt_length=prompt.length,
        prompt_digest=prompt.digest,
        request=span_list.record(
            request.head, call.base_id, None if tools is None else list_digest(tools)
        ),
        reply=finished.answer.body,
        started_at=call.started_at,
        first_token_s=call.first_token_s,
        duration_s=time.perf_counter() - call.clock_start,
        extra=_extra(finished, unpaired),
        experts=_experts(sample, prompt.length) if sample.extra or sample.extra_before else None,
    )


def _experts(sample: SampledReply, prompt_length: int) -> bytes | None:
    """Pack the routed experts that the engine reported; a token has those of the first try."""
    parts = [one[KEY] for one in (*sample.extra_before, sample.extra) if KEY in one]
    start = min((part.start for part in parts), default=0)
    moved = [Experts(part.start - start, part.rows) for part in parts]
    rows = merge_rows(moved, prompt_length + len(sample.output_ids) - 1 - start)
    return None if rows is None else pack(Experts(start, rows))


def sampled_under(prompted: Prompted, sample: SampledReply) -> tuple[PromptIds, Call | None]:
    """Return the prompt that the engine really used, and the earlier call whose ids it extends."""
    if sample.engine_prompt is not None:
        return sample.engine_prompt, None
    return prompted.prompt, prompted.parent


def _root_reason(finished: Finished) -> str | None:
    if finished.sample.engine_prompt is not None:
        return "engine_prompt"
    return finished.prompted.root_reason


def new_bodies(finished: Finished, stored: set[bytes]) -> Mapping[bytes, bytes]:
    """Return the raw messages and tools of a call whose digests are not in `stored`."""
    request, span_list = finished.question.request, finished.call.spans
    new_spans = request.message_spans[len(request.message_spans) - len(span_list.new) :]
    spans = zip(span_list.new, new_spans, strict=True)
    new: dict[bytes, bytes] = {}
    for digest, body in spans:
        if digest not in stored:
            new[digest] = body  # noqa: PERF403 - a comprehension is one more call of each turn
    if request.tools_span is not None:
        tools = list_digest(request.tools_span)
        if tools not in stored:
            new[tools] = request.tools_span
    return new


def _extra(finished: Finished, unpaired: int) -> JSON:
    """Return further facts of the exchange; absent keys mean no, none or exact."""
    question, sample, reply = finished.question, finished.sample, finished.reply
    placement, request = question.placement, question.request
    asked, parent = finished.call.asked, finished.prompted.parent
    facts: JSON = {
        "placement": str(placement.kind),
        "model": request.model,
        "other_model": finished.call.other,
        "kind_rule": asked.kind_rule,
        "retry_count": asked.retry_count,
        "idempotency_keys": sorted(finished.call.idempotency_keys),
        "question": question.key.hex(),
        "drift": placement.drift,
        "habit": placement.habit,
        "tie": placement.tie,
        "orphans": len(orphans) if (orphans := question.canonical.pairing.orphans) else 0,
        "unpaired": unpaired,
        "repeats": list(placement.repeats),
        "turns": None if (turns := finished.call.turns) is None else turns.as_json(),
        "break": None if sample.break_position is None else _break(sample),
        "resumed": sample.resumed,
        "replayed": sample.replayed,
        "versions": "mixed" if sample.mixed else None,
        "stream": _streamed(finished.call) if request.stream else None,
        "error": None if finished.call.error is None else finished.call.error.code,
        "discarded": sample.discarded,
        "tokens_unseen": reply.tokens_unseen,
        "reasoning_tokens": reply.reasoning_tokens,
        "calls_as_text": reply.calls_as_text,
        "malformed_calls": _malformed(reply) if reply.tool_calls else reply.calls_unread,
        "prefill": request.prefill,
        "unenforced": unenforced(
            request, reply, finished.effective, constrained=finished.call.grammar is not None
        ),
        "reasoning_restored": parent is not None and parent.reasoned and _restored(finished),
        "removed": request.extra.get("removed"),
        "unknown": _unknown(finished),
        "media": [*finished.call.images],
        "prompt": finished.prompted.rendered_by,
        "markers_parted": finished.prompted.parted,
        "noise": list(finished.prompted.noise),
        "cached_tokens": sample.last.cached_tokens,
        "engine": sample.extra and _others(sample.extra),
        "engine_before": sample.extra_before and _all_others(sample.extra_before),
    }
    return dict(filter(itemgetter(1), facts.items()))


def _others(reported: JSON) -> JSON:
    """Return what an engine reported without the routed experts, which stand by themselves."""
    return {name: value for name, value in reported.items() if name != KEY}


def _all_others(reported: list[JSON]) -> list[JSON]:
    """Return the same of each earlier try, where there is more than its number of tokens."""
    return [one for one in map(_others, reported) if len(one) > 1]


def _malformed(reply: Reply) -> int:
    """Count the calls whose arguments are no JSON object, or that could not be read at all."""
    odd = [call for call in reply.tool_calls if parsed_object(call.arguments) is None]
    return reply.calls_unread + len(odd)


def _unknown(finished: Finished) -> JSON:
    """Count the unknown fields, betas, and fields and blocks of new messages, by name.

    Beyond `MOST_NAMES` they are counted as `more`: a request may have 250,000.
    """
    question = finished.question
    request, placement = question.request, question.placement
    names: list[str] = []
    if "unknown" in request.extra:
        names += request.extra["unknown"]
    if (betas := finished.call.asked.unknown_betas) != ():
        names += [f"beta: {beta}" for beta in betas]
    new = request.messages[0 if placement.parent is None else placement.new_from :]
    for one in new:
        names += one.unknown
        for part in one.content:
            if type(part) is not TextPart and (name := block_name(part)):
                names += (f"block: {name}",)
    if not names:
        return {}
    counted = dict(Counter(name[:NAME_CHARS] for name in names[:MOST_NAMES]))
    if len(names) > MOST_NAMES:
        counted["more"] = len(names) - MOST_NAMES
    return counted


def images_of(finished: Finished) -> Sequence[JSON]:
    """Return the images of the prompt, in order.

    They have their positions if the engine used the prompt that was sent.
    """
    shown = finished.prompted.shown
    images = finished.prompted.images if shown is None else shown.images
    return images if finished.sample.engine_prompt is None else unplaced(images)


def _streamed(call: Call) -> str:
    """Return how the reply is sent: `live`, as it is sampled, or `whole`."""
    return "live" if call.live is not None and call.live.is_live else "whole"


def _break(sample: SampledReply) -> JSON:
    return {"position": sample.break_position, "reason": "engine_prompt"}


def _restored(finished: Finished) -> bool:
    """Return whether the harness left out the parent's reasoning, which the prompt has."""
    new_from = finished.question.placement.new_from
    echoed = finished.question.request.messages[max(0, new_from - 1) : new_from]
    return not any(message.reasoning for message in echoed)
