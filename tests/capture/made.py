"""Made-up sessions with the bookkeeping a gateway does: digests, deltas, spans, deliveries.

Texts are words of a fixed list, so that they compress about as real ones do. A call's ids are given
or drawn; its prompt is what its parent's ids and its own new ids make.
"""

import hashlib
import json

import numpy as np

from bridle.capture.records import (
    Delivery,
    Exchange,
    Outcome,
    RequestRecord,
    SessionCapture,
    SessionRecord,
)
from bridle.types import (
    DeliveryState,
    Dialect,
    FinishReason,
    Kind,
    LogprobMode,
    Sampling,
    VersionSpan,
)

TEXT = """
the file lists every test that failed since last run and path of its log error at line value
return import assert expected but found when reading config from disk open close"""


def digest_of(ids):
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).digest()


def content_digest(raw):
    return hashlib.sha256(raw).digest()[:16]


class MadeSession:
    """Builds a session call by call; `capture()` is what a store would give back."""

    def __init__(self, session_id="s1", *, seed=0, metadata=None, texts=True):
        self.session_id = session_id
        self.record = SessionRecord(session_id, 1000.0, "task-1", metadata or {})
        self.random = np.random.default_rng(seed)
        self.texts = texts
        self.exchanges: list[Exchange] = []
        self.deliveries = {}
        self.bodies = {}
        self.new_bodies = {}
        self.prompts = {}
        self.outputs = {}
        self.spans = {}
        self.turns = {}
        self.outcome: Outcome | None = None
        self.clock = 1000.0

    def ids(self, given):
        """`given` ids, or that many drawn ones."""
        if isinstance(given, int):
            return self.random.integers(0, 150_000, given, dtype=np.int32)
        return np.asarray(given, dtype=np.int32)

    def words(self, tokens):
        return " ".join(self.random.choice(TEXT.split(), max(1, tokens)))

    def full(self, exchange_id):
        """Prompt and output ids of a call."""
        return np.concatenate([self.prompts[exchange_id], self.outputs[exchange_id]])

    def call(
        self,
        parent=None,
        *,
        new=10,
        output=5,
        exchange_id=None,
        continues="parent",
        kept=None,
        state=DeliveryState.DELIVERED,
        started_at=None,
        root_reason=None,
        tools=None,
        first_message=None,
        **fields,
    ):
        """One exchange after `parent` (an id, or `None` for a root); returns it."""
        exchange_id = exchange_id or f"x{len(self.exchanges)}"
        continues = parent if continues == "parent" else continues
        before = self.full(parent) if parent is not None else np.empty(0, np.int32)
        kept = len(before) if kept is None else kept
        suffix, sampled = self.ids(new), self.ids(output)
        prompt = np.concatenate([before[:kept], suffix])
        self.clock += 1.0
        started_at = self.clock if started_at is None else started_at
        request, bodies = self._request(exchange_id, continues, len(suffix), tools, first_message)
        turns = self.turns[exchange_id] = self._turns(parent, continues)
        values = self._usual(sampled) | {
            "root_reason": root_reason or (None if parent else "first"),
            "prompt_digest": digest_of(prompt),
            "prompt_length": len(prompt),
            "reply": self._reply(exchange_id, len(sampled)),
            "request": request,
        }
        exchange = Exchange(
            exchange_id=exchange_id,
            session_id=self.session_id,
            index=len(self.exchanges),
            parent_id=parent,
            continues=continues,
            kept=kept,
            suffix_ids=suffix,
            output_ids=sampled,
            started_at=started_at,
            **(values | fields | {"extra": {"turns": turns, **fields.get("extra", {})}}),
        )
        self.exchanges.append(exchange)
        self.prompts[exchange_id], self.outputs[exchange_id] = prompt, sampled
        self.new_bodies[exchange_id] = bodies
        self.bodies.update(bodies)
        if state is not None:
            self.deliver(exchange_id, state, at=started_at + 0.5)
        return exchange

    def _usual(self, sampled):
        return {
            "dialect": Dialect.OPENAI_CHAT,
            "kind": Kind.AGENT,
            "logprobs": self.random.random(len(sampled), dtype=np.float32) * np.float32(-3),
            "logprob_mode": LogprobMode.PROCESSED,
            "versions": (VersionSpan(7, 0, len(sampled)),),
            "finish_reason": FinishReason.STOP,
            "sampling": Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4096),
            "constrained": False,
            "first_token_s": 0.01,
            "duration_s": 0.25,
            "extra": {},
        }

    def _turns(self, parent, continues):
        """Lineage counts as a gateway keeps them: of what it continues, and its reply."""
        if continues is None:
            return {"verbatim": 0, "rerendered": 0, "foreign": 0, "given": 0,
                    "tokens_rerendered": 0}  # fmt: skip
        before = self.turns.get(continues) or self._turns(None, None)
        if parent is not None:
            return before | {"verbatim": before["verbatim"] + 1}
        shown = before["verbatim"] + before["rerendered"] + 1
        return before | {"verbatim": 0, "rerendered": shown, "tokens_rerendered": 5 * shown}

    def deliver(self, exchange_id, state=DeliveryState.DELIVERED, *, at=None, detail=""):
        at = self.clock + 0.5 if at is None else at
        self.deliveries[exchange_id] = Delivery(exchange_id, self.session_id, state, at, detail)
        return self.deliveries[exchange_id]

    def end(self, reward=1.0, status="COMPLETED", **fields):
        self.outcome = Outcome(self.session_id, status, self.clock + 2.0, reward, **fields)
        return self.outcome

    def capture(self):
        return SessionCapture(
            self.record, tuple(self.exchanges), self.deliveries, self.bodies, self.outcome
        )

    async def write(self, store):
        """Give everything to a store, in order."""
        await store.open_session(self.record)
        for exchange in self.exchanges:
            await store.commit(exchange, self.new_bodies[exchange.exchange_id])
            if (delivery := self.deliveries.get(exchange.exchange_id)) is not None:
                await store.deliver(delivery)
        if self.outcome is not None:
            await store.close_session(self.outcome)

    def _reply(self, exchange_id, tokens):
        text = self.words(tokens) if self.texts else "ok"
        message = {"role": "assistant", "content": f"{exchange_id}: {text}"}
        self.spans[exchange_id + "/reply"] = json.dumps(message).encode()
        body = {
            "id": f"chatcmpl-{exchange_id}",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }
        return json.dumps(body).encode()

    def _request(self, exchange_id, continues, tokens, tools, first_message):
        """Spans as a harness sends them: all it sent before, our reply, then something new."""
        text = self.words(tokens) if self.texts else "go"
        if continues is None or continues not in self.spans:
            spans = (
                json.dumps({"role": "system", "content": "You fix tests."}).encode(),
                json.dumps(first_message or {"role": "user", "content": text}).encode(),
            )
            kept, base, whole = 0, None, spans
        else:
            history = self.spans[continues]
            spans = (
                self.spans[continues + "/reply"],
                json.dumps({"role": "user", "content": text}).encode(),
            )
            kept, base, whole = len(history), continues, history + spans
        self.spans[exchange_id] = whole
        bodies = {content_digest(span): span for span in spans}
        tool_digest = None
        if tools is not None:
            raw = json.dumps(tools).encode()
            tool_digest = content_digest(raw)
            bodies[tool_digest] = raw
        head = json.dumps({"model": "policy", "stream": True, "max_tokens": 4096}).encode()
        digests = tuple(content_digest(span) for span in spans)
        return RequestRecord(head, base, kept, digests, tool_digest), bodies
