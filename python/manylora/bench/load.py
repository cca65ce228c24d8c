"""The open loop: requests go out when they are due, whatever becomes of those before them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence

from manylora.bench.measure import Measurement

# Sends a request and fills in its measurement; what goes wrong is told there.
Send = Callable[[int, Measurement], Awaitable[None]]


async def run(
    requests: Sequence[Measurement],
    send: Send,
    max_concurrency: int | None = None,
    finished: Callable[[Measurement], object] | None = None,
) -> tuple[float, float]:
    """Send every request at its time, and return when the run began and ended.

    `due` of each request is in seconds after the beginning, and on the loop's clock afterwards. At most
    `max_concurrency` run at a time; more wait in the order in which they were due, which is told as such and not as
    lateness: the sender's own lateness is what a busy client adds, and would otherwise hide in a server's good figures.
    """
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    start = loop.time()

    async def one(number: int, request: Measurement) -> None:
        request.released = loop.time()
        if places is not None:
            await places.acquire()
        try:
            request.sent = loop.time()
            await send(number, request)
        finally:
            if places is not None:
                places.release()
        if finished is not None:
            finished(request)

    tasks: list[asyncio.Task[None]] = []
    # Collections of what thousands of requests left would stop the sender for tens of milliseconds.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for number, request in sorted(enumerate(requests), key=lambda item: item[1].due):
            request.due += start
            if request.due > loop.time():
                await asyncio.sleep(request.due - loop.time())
            tasks.append(asyncio.create_task(one(number, request)))
        await asyncio.gather(*tasks)
    finally:
        if was_enabled:
            gc.enable()
        for task in tasks:
            task.cancel()
    return start, loop.time()
