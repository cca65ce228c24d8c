"""What the load generator itself costs and adds: 200 streams of a server that does nothing but send on time.

The server is a process of its own that sends one event to every stream at the same moments. Whatever the client's gaps
differ from the server's is the client's doing, and its CPU seconds are what it takes from a server on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import ClassVar

from manylora.bench import load
from manylora.bench.client import Client
from manylora.bench.measure import Measurement
from manylora.bench.summary import percentile
from manylora.bench.target import Target

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str, **fields: object) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
    body = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1, "model": "base"}
    return b"data: " + json.dumps(body | {"choices": [choice]} | fields).encode() + b"\n\n"


class Stream(asyncio.Protocol):
    """A connection that waits for the next round once a request has come."""

    waiting: ClassVar[list[Stream]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        Stream.waiting.append(self)


async def serve(streams: int, tokens: int, gap: float, told: Connection) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Stream, "127.0.0.1", 0)
    told.send(server.sockets[0].getsockname()[1])
    while len(Stream.waiting) < streams:
        await asyncio.sleep(0.001)
    word, rounds = chunk(event(" word")), []
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    last = chunk(event("", usage=usage) + b"data: [DONE]\n\n") + b"0\r\n\r\n"
    start = loop.time() + 0.2
    for number in range(tokens):
        await asyncio.sleep(max(0.0, start + number * gap - loop.time()))
        rounds.append(loop.time())
        data = HEAD + word if number == 0 else word
        for stream in Stream.waiting:
            stream.transport.write(data + last if number == tokens - 1 else data)
    told.send([later - earlier for earlier, later in pairwise(rounds)])
    await asyncio.sleep(1)


def run_server(*arguments: object) -> None:
    asyncio.run(serve(*arguments))  # type: ignore[arg-type]


async def ask(port: int, streams: int) -> list[Measurement]:
    target = Target(Client(f"http://127.0.0.1:{port}"), "/v1/completions")
    measured = [Measurement("base", True, 0.0) for _ in range(streams)]
    await load.run(measured, lambda _, one: target.send(b"{}", one))
    target.read_answers()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--gap", type=float, default=0.02, help="seconds between two tokens of a stream")
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    options = (arguments.streams, arguments.tokens, arguments.gap, theirs)
    server = multiprocessing.Process(target=run_server, args=options, daemon=True)
    server.start()
    port = ours.recv()
    used, began = time.process_time(), time.perf_counter()
    measured = asyncio.run(ask(port, arguments.streams))
    seconds, wall = time.process_time() - used, time.perf_counter() - began
    sent = sorted(ours.recv())
    server.join()
    assert all(one.error is None for one in measured), measured[0].error
    gaps = sorted(gap for one in measured for gap in one.itls)
    events = arguments.streams * arguments.tokens
    result = {
        "streams": arguments.streams,
        "events_per_second": arguments.streams / arguments.gap,
        "client_cpu_share": seconds / wall,
        "client_cpu_us_per_event": seconds / events * 1e6,
        "server_itl_ms": {f"p{percent}": percentile(sent, percent) * 1000 for percent in (1, 50, 99)},
        "client_itl_ms": {f"p{percent}": percentile(gaps, percent) * 1000 for percent in (1, 50, 99)},
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
