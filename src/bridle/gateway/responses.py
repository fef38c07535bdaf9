"""The response store: replies that a client may name by their id.

They are those of OpenAI Responses, and the messages of Anthropic's threads.

A kept reply is an exchange of the session, so everything is in the capture already: nothing is
written a second time, and a gateway that starts again knows every id (`restore`). In memory each
session keeps which exchange an id is, and the items of its newest replies, so that a conversation
that goes on by an id (`previous_response_id`, `thread`) costs its new items and one copy of the
bytes of the old ones.

An id means something to the session that it was made for and to no other (law 7).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bridle.capture.records import Delivery, Exchange, Store
from bridle.dialects.anthropic import Anthropic
from bridle.dialects.base import Route, StoredReply
from bridle.dialects.openai_responses import OpenAIResponses
from bridle.dialects.openai_responses_write import deleted_json, items_page
from bridle.errors import RequestError
from bridle.types import DeliveryState, Dialect, ModelRequest

if TYPE_CHECKING:
    from bridle.gateway.registry import GatewaySession

DELETED: Final = "deleted by the client"
"""Detail of the delivery record of a reply whose id its client has deleted."""

REPLY_ID: Final = 24
"""Characters of a reply's id without its prefix."""

NEWEST: Final = 4
"""Replies of a session whose items are kept in memory: one per conversation that goes on."""


class Shelf:
    """The replies of one session that can be named, by their ids."""

    def __init__(self) -> None:
        self._exchanges: dict[str, str] = {}
        self._newest: dict[str, StoredReply] = {}
        """By id; the newest last."""

    def keep(self, response_id: str, exchange_id: str, kept: StoredReply) -> None:
        """Register a committed reply, so that requests can refer to it; its items are kept in
        memory.
        """
        self.know(response_id, exchange_id)
        self._newest[response_id] = kept
        if len(self._newest) > NEWEST:
            del self._newest[next(iter(self._newest))]

    def know(self, response_id: str, exchange_id: str) -> None:
        """Register a reply of an earlier process, so that requests can refer to it."""
        self._exchanges[response_id] = exchange_id

    def forget(self, response_id: str) -> None:
        """Remove a reply: requests cannot refer to it any more."""
        self._exchanges.pop(response_id, None)
        self._newest.pop(response_id, None)

    def exchange_of(self, response_id: str) -> str | None:
        """Return the exchange of a stored reply; `None` = there is none of that id."""
        return self._exchanges.get(response_id)

    def at_hand(self, response_id: str) -> StoredReply | None:
        """Return the reply and its request if they are in memory; else `None`."""
        return self._newest.get(response_id)


class Responses:
    """Serves kept replies, and makes requests whole that go on from one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._wire = OpenAIResponses()
        self._messages = Anthropic()

    def resolved(self, session: GatewaySession, dialect: Dialect, body: bytes) -> bytes:
        """Return a request's body with each reference to a stored reply replaced by the reply's
        items.
        """
        if dialect is not Dialect.OPENAI_RESPONSES:
            return body
        return self._wire.resolved(body, lambda item_id: self._item(session, item_id))

    def _item(self, session: GatewaySession, item_id: str) -> bytes | None:
        """Return an output item of a kept reply; its id begins with its reply's
        (`dialects.ids`).
        """
        of = item_id.partition("_")[2][:REPLY_ID]
        if (found := self._find(session, f"resp_{of}")) is None:
            return None
        name = b'"' + item_id.encode() + b'"'
        return next((item for item in self._wire.output_items(found.reply) if name in item), None)

    def whole(
        self, session: GatewaySession, route: Route, body: bytes, request: ModelRequest
    ) -> ModelRequest:
        """Return the request with its whole history where it continues a stored reply.

        Raises the provider's 404 `RequestError` for an id that this session does not know.
        """
        previous = request.extra.get("previous")
        if previous is None:
            return request
        in_thread = request.dialect is Dialect.ANTHROPIC
        wire: Anthropic | OpenAIResponses = self._messages if in_thread else self._wire
        found = self._find(session, previous, "msg_" if in_thread else "resp_")
        if found is None:
            raise wire.unknown_previous(previous)
        return wire.parse(route, wire.continued(body, found), session.messages)

    async def answer(self, session: GatewaySession, route: Route, query: str) -> bytes:
        """Return the JSON answer to a request about one stored reply (show, items, delete).

        Raises the API's own `RequestError`.
        """
        response_id = route.resource or ""
        found = self._find(session, response_id)
        if found is None:
            message = f"Response with id {response_id!r} not found."
            raise RequestError(message, status=404, code="not_found", param="response_id")
        match route.action:
            case "input_items":
                return items_page(found.items, query)
            case "delete":
                await self._delete(session, response_id)
                return deleted_json(response_id)
            case "cancel":
                raise RequestError("Cannot cancel a synchronous response.", param="response_id")
            case _ if "stream=true" in query.lower():
                message = "Only a response that was made in the background can be streamed again."
                raise RequestError(message, param="stream")
            case _:
                return found.reply

    def _find(
        self, session: GatewaySession, response_id: str, prefix: str = "resp_"
    ) -> StoredReply | None:
        """Return a kept reply whose id has the prefix of its dialect; `None` = there is none."""
        exchange_id = session.shelf.exchange_of(response_id)
        call = session.calls.get(exchange_id or "")
        if call is None or not response_id.startswith(prefix):
            return None
        if (at_hand := session.shelf.at_hand(response_id)) is not None:
            return at_hand
        capture = self._store.read(session.session_id)
        exchange = _exchange(capture.exchanges, call.exchange_id)
        asked = exchange.request
        items = tuple(capture.bodies[digest] for digest in call.spans.whole())
        tools = None if asked.tools is None else capture.bodies[asked.tools]
        return StoredReply(items, exchange.reply, asked.head, tools)

    async def _delete(self, session: GatewaySession, response_id: str) -> None:
        """Forget an id for good: the note of it is durable before the client hears of it.

        What was captured stays.
        """
        exchange_id = session.shelf.exchange_of(response_id) or ""
        session.shelf.forget(response_id)
        known = self._store.deliveries(session.session_id).get(exchange_id) or Delivery(
            exchange_id, session.session_id, DeliveryState.DELIVERED, time.time()
        )
        await self._store.deliver(replace(known, detail=DELETED))
        await self._store.flush()


def _exchange(exchanges: Sequence[Exchange], exchange_id: str) -> Exchange:
    return next(exchange for exchange in exchanges if exchange.exchange_id == exchange_id)
