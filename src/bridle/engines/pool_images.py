"""What a pool says of images: what the first of its living replicas says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from bridle.engines.base import Seeing, Seen
from bridle.engines.pool_replica import Replica, ReplicaState
from bridle.errors import EngineError
from bridle.types import JSON


class SeesByReplica(ABC):
    """`bridle.engines.base.Seeing` of something that has replicas of one model."""

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
