"""Rendering of messages by the first live replica of a pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridle.engines.base import Seeing, Seen, Templating
from bridle.engines.pool_replica import Replica, ReplicaState
from bridle.errors import EngineError
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.types import Ids


class SeesByReplica(ABC):
    """`Seeing` and `Templating` of something that has replicas of one model."""

    @abstractmethod
    def each(self) -> list[Replica]:
        """The replicas that have started."""

    async def see(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Seen | None:
        """See `Seeing.see`; retryable `EngineError` while no replica is to be had."""
        for one in self.each():
            if not isinstance(one.engine, Seeing):
                return None
            if one.state is ReplicaState.LIVE:
                return await one.engine.see(messages, tools, arguments)
        raise EngineError("no replica is ready", retryable=True)

    async def template(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Ids:
        """See `Templating.template`; another replica is asked where one fails."""
        failed: EngineError | None = None
        for one in self.each():
            if one.state is not ReplicaState.LIVE or not isinstance(one.engine, Templating):
                continue
            try:
                return await one.engine.template(messages, tools, arguments)
            except EngineError as error:
                if not error.retryable:
                    raise
                failed = error
        raise failed or EngineError("no replica is ready", retryable=True)
