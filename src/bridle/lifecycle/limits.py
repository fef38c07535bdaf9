"""Ends a session whose limit is reached, after giving the harness the time to end by itself.

The gateway refuses every further call in the provider's own words for a used-up budget; most
harnesses then stop. One that tries on, or waits, is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bridle.lifecycle.ending import Facts

POLL_S = 0.5


async def limit_outstayed(facts: Callable[[], Facts], *, grace_s: float) -> str:
    """Return the reached limit's name when it has been reached for `grace_s`; else never return."""
    while (limit := facts().limit) is None:  # noqa: ASYNC110 - the gateway tells it only when asked
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(grace_s)
    return limit
