"""A request as a flat list of atoms and a chain of digests over them. Pure.

Message and item borders are not part of the key: a turn may be one message or five items, in any
dialect, and its atoms are the same. What the model must see is in an atom (system, user, media,
assistant text, call, result); what harnesses change without meaning it is not (ids, status, cache
marks, signatures, reasoning, argument spacing). The rules are R1 to R8 of the matching document;
R1 and R7 are the dialects' work, which give us named fields only, R9 is their noise rules'.

`chain[i]` covers the first `i` atoms, so two requests with one `chain[i]` begin alike. Tools, model
and sampling are not in the chain: tools are guarded by `tools_digest`, the others do not matter.

`Walks` keeps a session's last canonical requests, so that a request which extends an earlier one
takes its atoms and chain over whole, without a look-up per message of its history.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from enum import StrEnum
from hashlib import sha256
from operator import attrgetter
from struct import pack

from bridle.dialects.tools import list_digest
from bridle.prompting.calls import (
    Defaults,
    Pairing,
    canonical_arguments,
    canonical_json,
    once_per_tools,
    schema_defaults,
    text_bytes,
)
from bridle.types import (
    Dialect,
    MediaPart,
    Message,
    ModelRequest,
    Part,
    Role,
    TextPart,
    ToolCall,
    ToolSpec,
    record,
)


class AtomKind(StrEnum):
    """Kind of an atom."""

    SYSTEM = "S"
    USER = "U"
    MEDIA = "I"
    TEXT = "A"
    """Text of the assistant."""
    CALL = "C"
    RESULT = "T"
    OTHER = "X"
    """Part of the context, but none of the above."""
    EVIDENCE = "E"
    """Not an atom of the chain: ids and reasoning of an assistant message, beside its atoms."""


ASSISTANT = frozenset({AtomKind.TEXT, AtomKind.CALL})
"""The kinds that a model's turn is made of."""


@record()
class Atom:
    """One thing that the model sees, or evidence about it."""

    kind: AtomKind
    digest: bytes
    """16 bytes over the canonical payload; empty for EVIDENCE."""
    ids: tuple[str, ...] = ()
    """CALL, RESULT: the call's id. EVIDENCE: the message's other ids and signatures."""
    text: str | None = None
    """TEXT: the text, stripped. CALL, RESULT: the tool's name. Else `None`."""
    reasoning: bytes | None = None
    """EVIDENCE: digest of the message's reasoning, stripped; `None` = it carried none."""
    arguments: str | None = field(default=None, compare=False)
    """CALL: the arguments as they came; `None` for a freeform tool's input."""
    offset: int = field(default=0, compare=False)
    """Index of its message in the span."""


@record()
class Hint:
    """Evidence as it lies beside a request's atoms."""

    position: int
    """Number of atoms before it; it belongs to those that follow in its message."""
    message: int
    """Index into the request's messages."""
    ids: tuple[str, ...]
    reasoning: bytes | None


@record()
class Canonical:
    """A request's atoms and the chain over them."""

    atoms: tuple[Atom, ...]
    chain: tuple[bytes, ...]
    """`len(atoms) + 1` digests of 16 bytes; the first is the dialect's seed."""
    message_of: tuple[int, ...]
    """For each atom, the index of its message in the request."""
    tools_digest: bytes
    """16 bytes over the tools that the prompt shows."""
    hints: tuple[Hint, ...] = ()
    """Evidence, in order."""
    pairing: Pairing = field(default_factory=Pairing)

    def until(self, messages: int) -> Canonical:
        """Return the atoms and hints of the first `messages` of the request, with an empty pairing.

        They must not end between two tool results, which may stand in another order.
        """
        atoms = bisect_left(self.message_of, messages)
        hints = bisect_left(self.hints, messages, key=attrgetter("message"))
        return Canonical(
            self.atoms[:atoms],
            self.chain[: atoms + 1],
            self.message_of[:atoms],
            self.tools_digest,
            self.hints[:hints],
        )


class AtomMemo(dict[bytes, tuple[Atom, ...]]):
    """Cache of the atoms of one session's requests: a known span costs a look-up, and a known
    beginning of a request nothing.

    Maps (tools digest + span digest) to the span's atoms, and a raw tool list to its digest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.defaults: dict[bytes, Defaults] = {}
        """Tools digest -> defaults of their arguments."""
        self.walks = Walks()

    def defaults_of(self, request: ModelRequest, tools: bytes) -> Defaults:
        """Return the default arguments in the schemas of a request's tools, whose digest is
        `tools`.
        """
        defaults = self.defaults.get(tools)
        if defaults is None:
            defaults = self.defaults[tools] = schema_defaults(request.tools)
        return defaults


def digest(kind: str, *fields: bytes) -> bytes:
    """Return 16 bytes of a hash over `kind` and the fields, each with its length before it."""
    lengths = pack(f"<{len(fields)}Q", *map(len, fields))
    return sha256(b"".join((f"{kind}:{len(fields)}:".encode(), lengths, *fields))).digest()[:16]


def _text_digest(kind: AtomKind, text: str) -> bytes:
    """Return the `digest` of one text, in fewer steps."""
    field = text.encode("utf-8", "surrogatepass")
    whole = _ALONE[kind] + len(field).to_bytes(8, "little") + field
    return sha256(whole).digest()[:16]


_ALONE = {kind: f"{kind}:1:".encode() for kind in AtomKind}


SEEDS = {dialect: digest("bridle-chain-1", dialect.encode()) for dialect in Dialect}
"""Start of each dialect's chain."""


def canonical(request: ModelRequest, memo: dict[bytes, tuple[Atom, ...]]) -> Canonical:
    """Return the atoms of a request (its texts, calls and results in normal form) and the chain of
    hashes over them.

    `memo` belongs to one session (an `AtomMemo`; a plain dict works, hashing the chain anew each
    time): only spans (raw messages) not seen before are normalised.
    """
    tools = _tools_digest_of(request, memo) if request.tools else NO_TOOLS
    if type(memo) is not AtomMemo:
        return _walked(request, tools, memo, AtomMemo(), None)
    known = memo.walks.find(request, tools)
    made = None if known is None else _grown(request, tools, memo, known)
    if made is None:
        made = _walked(request, tools, memo, memo, known)
    memo.walks.remember(request, made, instead_of=known)
    return made


def _grown(request: ModelRequest, tools: bytes, memo: AtomMemo, known: Known) -> Canonical | None:
    """Build what `_walked` does after what is `known`, where each new span is one message.

    `None` = two results stand side by side, whose order has to be looked at.
    """
    begun, done = known.canonical, len(known.spans)
    lengths = request.span_lengths[done:]
    new = len(lengths)
    if not new or lengths != (1,) * new or known.messages + new != len(request.messages):
        return None
    atoms, message_of = list(begun.atoms), list(begun.message_of)
    chain, hints = list(begun.chain), begun.hints
    before = atoms[-1].kind if atoms else None
    paired = False
    for at, span in enumerate(request.span_digests[done:], known.messages):
        key = tools + span
        made = memo.get(key)
        if made is None:
            message, defaults = request.messages[at], None
            if message.tool_calls:
                defaults = memo.defaults_of(request, tools)
            made = memo[key] = message_atoms(message, request.dialect, defaults)
        for atom in made:
            kind = atom.kind
            if kind is AtomKind.EVIDENCE:
                hints += (Hint(len(atoms), at, atom.ids, atom.reasoning),)
                continue
            if kind is AtomKind.RESULT and before is AtomKind.RESULT:
                return None
            before = kind
            paired |= kind is AtomKind.CALL or kind is AtomKind.RESULT
            atoms += (atom,)
            message_of += (at,)
            chain += (sha256(chain[-1] + atom.digest).digest()[:16],)
    pairing = begun.pairing
    if paired or hints is not begun.hints:
        read = len(begun.atoms), len(begun.hints)
        pairing = pairing.after(atoms, hints, chain, read=read)
    return Canonical(tuple(atoms), tuple(chain), tuple(message_of), tools, hints, pairing)


def _walked(
    request: ModelRequest,
    tools: bytes,
    spans: dict[bytes, tuple[Atom, ...]],
    memo: AtomMemo,
    known: Known | None,
) -> Canonical:
    """Return the request's atoms and chain, after those that are `known`."""
    walk = _Walk(request, tools, memo, None if known is None else known.canonical)
    position, done = request.head_messages, 0
    if known is None:
        for index in range(position):
            walk.add(message_atoms(request.messages[index], request.dialect), index, 1)
    else:
        position, done = known.messages, len(known.spans)
    if sum(request.span_lengths) + request.head_messages != len(request.messages):
        messages = request.messages[position:]  # no spans given
        walk.add(walk.span_atoms(messages), position, len(messages))
        return walk.finish()
    for span, length in zip(request.span_digests[done:], request.span_lengths[done:], strict=True):
        key = tools + span
        atoms = spans.get(key)
        if atoms is None:
            messages = request.messages[position : position + length]
            atoms = spans[key] = walk.span_atoms(messages)
        walk.add(atoms, position, length)
        position += length
    if walk.splits_results():
        return _walked(request, tools, spans, memo, None)
    return walk.finish()


def chain_after(link: bytes, atoms: Iterable[Atom]) -> bytes:
    """Return the hash chain's digest `link` continued by more atoms."""
    for atom in atoms:
        link = sha256(link + atom.digest).digest()[:16]
    return link


def text_after(link: bytes, kind: AtomKind, text: str) -> bytes:
    """Return the hash chain's digest `link` continued by the atom of one text, which is not
    empty.
    """
    return sha256(link + _text_digest(kind, text)).digest()[:16]


def answer_atoms(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[Atom, ...]:
    """Return the atoms of a delivered reply, as a harness that repeats it unchanged will send them
    back.

    `messages` are the assistant messages of the reply in its dialect's own shape. EVIDENCE stands
    beside the atoms; a reply without any other atom (reasoning only, empty) cannot be found by the
    chain.
    """
    atoms: list[Atom] = []
    for offset, message in enumerate(messages):
        defaults = schema_defaults(tools) if message.tool_calls else {}
        atoms += _assistant_atoms(message, defaults, offset)
    return tuple(atoms)


def joined_atoms(request: ModelRequest, messages: Sequence[Message]) -> tuple[Atom, ...]:
    """Return the atoms (no EVIDENCE) of a reply joined with the beginning that the client gave it.

    Most clients of a prefill send both back as one text. Empty = the client began nothing.
    """
    if request.prefill is None or not messages:
        return ()
    whole = replace(messages[0], content=(TextPart(request.prefill), *messages[0].content))
    atoms = answer_atoms((whole, *messages[1:]), request.tools)
    return tuple(atom for atom in atoms if atom.kind is not AtomKind.EVIDENCE)


@once_per_tools
def tools_digest(tools: Sequence[ToolSpec]) -> bytes:
    """Return 16 bytes of a hash over the ordered tools: name, description, schema.

    No tools give `NO_TOOLS`. Tools whose loading is deferred are not among a request's tools (the
    dialects see to it), so they may come and go.
    """
    fields: list[bytes] = []
    for tool in tools:
        fields.append(text_bytes(tool.name))
        fields.append(text_bytes(tool.description or ""))
        fields.append(canonical_json(tool.parameters or {}))
    return digest("tools", *fields)


NO_TOOLS = digest("tools")
"""`tools_digest` of an empty list."""


def message_atoms(
    message: Message, dialect: Dialect, defaults: Defaults | None = None, offset: int = 0
) -> tuple[Atom, ...]:
    """Return one message's atoms (texts, calls and results in normal form), in order.

    `defaults` are those of the request's tools.
    """
    if message.role is Role.TOOL:
        ids = () if message.tool_call_id is None else (message.tool_call_id,)
        payload = _result_digest(message.content, dialect)
        return (Atom(AtomKind.RESULT, payload, ids, message.name, offset=offset),)
    if message.role is Role.ASSISTANT:
        return _assistant_atoms(message, defaults or {}, offset)
    kind = AtomKind.SYSTEM if message.role is Role.SYSTEM else AtomKind.USER
    if (text := only_text(message.content)) is not None:
        return (Atom(kind, _text_digest(kind, text), offset=offset),) if text else ()
    return _part_atoms(message.content, kind, offset)


def only_text(content: Sequence[Part]) -> str | None:
    """Return the text of a message's content if it is one text; `None` = it is not."""
    if content and not content[1:] and type(part := content[0]) is TextPart:
        return part.text
    return None


def results_in_call_order(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with each run of tool results in the order of the calls that they answer.

    A template without ids shows results by position only. A run is left in its own order unless the
    id of every result in it is known from the assistant messages right before. A result without a
    name gets its call's, for templates that show it.
    """
    ordered = list(messages)
    start = 0 if Role.TOOL in [message.role for message in ordered] else len(ordered)
    while start < len(ordered):
        end = start
        while end < len(ordered) and ordered[end].role is Role.TOOL:
            end += 1
        if end > start:
            ordered[start:end] = _settled(_calls_before(ordered, start), ordered[start:end])
        start = max(end, start + 1)
    return tuple(ordered)


def _settled(calls: Sequence[ToolCall], results: Sequence[Message]) -> list[Message]:
    """Return one run of results, named and in order."""
    names = {call.id: call.name for call in calls if call.id is not None}
    named = [
        replace(message, name=names[message.tool_call_id])
        if message.name is None and message.tool_call_id in names
        else message
        for message in results
    ]
    ranks = _ranks([call.id for call in calls], [message.tool_call_id for message in results])
    if ranks is None:
        return named
    return [named[index] for index in sorted(range(len(named)), key=ranks.__getitem__)]


def messages_after(messages: Sequence[Message], new_from: int) -> tuple[Message, ...]:
    """Return the messages from `new_from` on, tool results named and ordered by the calls before
    them.

    A prompt is extended by these: as `results_in_call_order` of all, at the cost of these only.
    """
    first = new_from
    while first and messages[first - 1].role is Role.ASSISTANT:
        first -= 1
    for message in messages[new_from:]:
        if message.role is Role.TOOL:
            return results_in_call_order(messages[first:])[new_from - first :]
    return tuple(messages[new_from:])


class _Walk:
    """Collects the atoms of one request and closes the chain over them."""

    def __init__(
        self, request: ModelRequest, tools: bytes, memo: AtomMemo, begun: Canonical | None
    ) -> None:
        self._request = request
        self._tools = tools
        self._memo = memo
        self._atoms: list[Atom] = [] if begun is None else list(begun.atoms)
        self._message_of: list[int] = [] if begun is None else list(begun.message_of)
        self._hints: list[Hint] = [] if begun is None else list(begun.hints)
        self._chain = [SEEDS[request.dialect]] if begun is None else list(begun.chain)
        self._pairing = Pairing() if begun is None else begun.pairing
        self._begun = len(self._atoms)
        """Number of closed atoms: ordered, and in the chain."""
        self._hinted = len(self._hints)

    def span_atoms(self, messages: Sequence[Message]) -> tuple[Atom, ...]:
        """Return the atoms of a span not seen before."""
        defaults = self._memo.defaults_of(self._request, self._tools)
        return _span_atoms(messages, self._request.dialect, defaults)

    def add(self, atoms: tuple[Atom, ...], position: int, length: int) -> None:
        """Append a span of `length` messages, the first of them the request's `position`-th."""
        if length == 1 and atoms:  # most spans; evidence stands first in its message
            if atoms[0].kind is AtomKind.EVIDENCE:
                self._hint(atoms[0], position)
                atoms = atoms[1:]
            self._atoms += atoms
            self._message_of += [position] * len(atoms)
            return
        for atom in atoms:
            if atom.kind is AtomKind.EVIDENCE:
                self._hint(atom, position + atom.offset)
            else:
                self._atoms.append(atom)
                self._message_of.append(position + atom.offset)

    def _hint(self, atom: Atom, message: int) -> None:
        self._hints.append(Hint(len(self._atoms), message, atom.ids, atom.reasoning))

    def splits_results(self) -> bool:
        """Return whether a run of results crosses the end of the known atoms."""
        at, atoms = self._begun, self._atoms
        if not 0 < at < len(atoms):
            return False
        return atoms[at - 1].kind is AtomKind.RESULT and atoms[at].kind is AtomKind.RESULT

    def finish(self) -> Canonical:
        """Order the results and close the chain."""
        self._order_results()
        chain = self._chain
        for atom in self._atoms[self._begun :]:
            chain += (sha256(chain[-1] + atom.digest).digest()[:16],)
        return Canonical(
            atoms=tuple(self._atoms),
            chain=tuple(chain),
            message_of=tuple(self._message_of),
            tools_digest=self._tools,
            hints=tuple(self._hints),
            pairing=self._pairing.after(
                self._atoms, self._hints, chain, read=(self._begun, self._hinted)
            ),
        )

    def _order_results(self) -> None:
        """Put each run of results in the order of the calls right before it (R8)."""
        kinds = [atom.kind is AtomKind.RESULT for atom in self._atoms[self._begun :]]
        start = 0
        while True in kinds:
            try:
                start = kinds.index(True, start)
            except ValueError:
                return
            end = start + 1
            while end < len(kinds) and kinds[end]:
                end += 1
            if end - start > 1:
                self._order_run(self._begun + start, self._begun + end)
            start = end

    def _order_run(self, start: int, end: int) -> None:
        calls: list[str | None] = []
        first = start
        while first and self._atoms[first - 1].kind in ASSISTANT:
            first -= 1
            if self._atoms[first].kind is AtomKind.CALL:
                calls.insert(0, _only(self._atoms[first].ids))
        ranks = _ranks(calls, [_only(atom.ids) for atom in self._atoms[start:end]])
        if ranks is None or ranks == sorted(ranks):
            return
        order = sorted(range(end - start), key=ranks.__getitem__)
        self._atoms[start:end] = [self._atoms[start + index] for index in order]
        self._message_of[start:end] = [self._message_of[start + index] for index in order]


def _span_atoms(
    messages: Sequence[Message], dialect: Dialect, defaults: Defaults
) -> tuple[Atom, ...]:
    if len(messages) == 1:
        return message_atoms(messages[0], dialect, defaults)
    return tuple(
        atom
        for offset, message in enumerate(messages)
        for atom in message_atoms(message, dialect, defaults, offset)
    )


def _assistant_atoms(message: Message, defaults: Defaults, offset: int) -> tuple[Atom, ...]:
    """Return the evidence first, then text (R6: stripped) and media in place, then calls."""
    atoms: list[Atom] = []
    thought = message.reasoning.strip() if message.reasoning else ""
    if thought or message.issued_ids:
        key = digest("reasoning", text_bytes(thought)) if thought else None
        atoms.append(Atom(AtomKind.EVIDENCE, b"", message.issued_ids, reasoning=key, offset=offset))
    only = only_text(message.content)
    for part in _joined(message.content) if only is None else (only,):
        if isinstance(part, MediaPart):
            atoms.append(_media_atom(part, offset))
        elif text := part.strip():
            payload = _text_digest(AtomKind.TEXT, text)
            atoms += (Atom(AtomKind.TEXT, payload, text=text, offset=offset),)
    if message.tool_calls:
        atoms += [_call_atom(call, defaults, offset) for call in message.tool_calls]
    return tuple(atoms)


def _call_atom(call: ToolCall, defaults: Defaults, offset: int) -> Atom:
    """Return a call's atom, its arguments in normal form (R4); a freeform tool's input is text."""
    if call.custom:
        arguments = b"c" + text_bytes(call.arguments)
    else:
        arguments = canonical_arguments(call.arguments, defaults.get(call.name))
    payload = digest(AtomKind.CALL, text_bytes(call.name), arguments)
    ids = () if call.id is None else (call.id,)
    raw = None if call.custom else call.arguments
    return Atom(AtomKind.CALL, payload, ids, text=call.name, arguments=raw, offset=offset)


def _part_atoms(content: Iterable[Part], kind: AtomKind, offset: int) -> tuple[Atom, ...]:
    atoms: list[Atom] = []
    for part in _joined(content):
        if isinstance(part, str):
            atoms += (Atom(kind, digest(kind, text_bytes(part)), offset=offset),)
        else:
            atoms += (_media_atom(part, offset),)
    return tuple(atoms)


def _media_atom(part: MediaPart, offset: int) -> Atom:
    kind = AtomKind.OTHER if part.media_type == "application/json" else AtomKind.MEDIA
    payload = digest(kind, part.media_type.encode(), part.digest.encode())
    return Atom(kind, payload, offset=offset)


def _result_digest(content: Iterable[Part], dialect: Dialect) -> bytes:
    """Return the digest of a result; Google's are JSON objects, compared by value."""
    fields: list[bytes] = []
    for part in _joined(content):
        if isinstance(part, MediaPart):
            fields += (b"media", part.media_type.encode(), part.digest.encode())
        elif dialect is Dialect.GOOGLE and part.lstrip().startswith("{"):
            fields += (b"json", canonical_arguments(part))
        else:
            fields += (b"text", text_bytes(part))
    return digest(AtomKind.RESULT, *fields)


def _joined(content: Iterable[Part]) -> list[MediaPart | str]:
    """Return the parts with adjacent texts as one (R2) and without empty ones (R3)."""
    joined: list[MediaPart | str] = []
    texts: list[str] = []
    if type(content) is tuple and len(content) == 1 and type(content[0]) is TextPart:
        return [content[0].text] if content[0].text else joined
    for part in content:
        if isinstance(part, TextPart):
            texts.append(part.text)
            continue
        if text := "".join(texts):
            joined.append(text)
        texts = []
        joined.append(part)
    if text := "".join(texts):
        joined.append(text)
    return joined


def _tools_digest_of(request: ModelRequest, memo: dict[bytes, tuple[Atom, ...]]) -> bytes:
    """Return the tools' digest, computed once per distinct raw tool list."""
    if not request.tools or request.tools_span is None:
        return tools_digest(request.tools)
    key = b"tools:" + list_digest(request.tools_span)
    known = memo.get(key)
    if known is None:
        known = memo[key] = (Atom(AtomKind.OTHER, tools_digest(request.tools)),)
    return known[0].digest


def _calls_before(messages: Sequence[Message], start: int) -> list[ToolCall]:
    """Return the calls of the assistant messages that end right before `start`."""
    first = start
    while first and messages[first - 1].role is Role.ASSISTANT:
        first -= 1
    return [call for message in messages[first:start] for call in message.tool_calls]


def _ranks(calls: Sequence[str | None], results: Sequence[str | None]) -> list[int] | None:
    """Return for each result the index of its call; `None` unless all are known, each once."""
    index = {call: rank for rank, call in enumerate(calls) if call is not None}
    ranks = [index[result] for result in results if result in index]
    whole = len(ranks) == len(results) == len(set(ranks))
    return ranks if whole else None


def _only(ids: tuple[str, ...]) -> str | None:
    return ids[0] if ids else None


KEPT = 4
"""Requests that are remembered: one per conversation that continues (agent, sub-agents)."""


@record()
class Known:
    """A request that was read."""

    head: tuple[Message, ...]
    """The messages that no span brought."""
    spans: tuple[bytes, ...]
    """Digests of its spans."""
    messages: int
    """Number of its messages."""
    canonical: Canonical


class Walks:
    """The last requests of one session, by dialect and tools."""

    def __init__(self) -> None:
        self._known: dict[tuple[Dialect, bytes], list[Known]] = {}
        """Newest first."""

    def find(self, request: ModelRequest, tools: bytes) -> Known | None:
        """Return the longest earlier request that this one continues; `tools` is the digest of its
        tools.
        """
        head = request.messages[: request.head_messages]
        best, most = None, -1
        for known in self._known.get((request.dialect, tools), ()):
            count = len(known.spans)
            if count <= most or known.head != head:
                continue
            if known.spans == request.span_digests[:count]:
                best, most = known, count
        return best

    def remember(
        self, request: ModelRequest, canonical: Canonical, *, instead_of: Known | None
    ) -> None:
        """Keep a request, in place of the one that it continues, for later requests that continue
        it.

        One without spans (raw messages) is not kept.
        """
        if not request.span_digests:
            return
        head = request.messages[: request.head_messages]
        newest = Known(head, request.span_digests, len(request.messages), canonical)
        key = request.dialect, canonical.tools_digest
        if instead_of is not None and self._known[key][0] is instead_of:
            self._known[key][0] = newest
        else:
            kept = [one for one in self._known.get(key, ()) if one is not instead_of]
            self._known[key] = [newest, *kept][:KEPT]
