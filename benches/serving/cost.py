"""What the server costs: tokens/s through HTTP streams against the engine's own, and CPU time of idle connections.

Both run the same requests on the same settings in turns: `LLM.generate` in this process, and `manylora serve` in
another, asked by as many streams. The ratio is of pairs that ran next to each other; absolute figures belong to the
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import manylora
from manylora import LLM, LoRARequest, SamplingParams
from manylora.bench.client import Answer, Client
from serving.conftest import Server
from serving.soak import tokens_of

ADAPTERS = Path(manylora.__file__).parent / "demo" / "adapters"
NAMES = ("sql", "json", "support")
SETTINGS: dict[str, Any] = {
    "device": "cpu", "max_model_len": 2048, "max_num_seqs": 64, "kv_cache_memory_bytes": 512 << 20, "max_lora_rank": 64,
    "served_model_name": "SmolLM2-135M-Instruct",
}  # fmt: skip


def asked(round_number: int, streams: int, length: int) -> list[tuple[str | None, list[int]]]:
    """The requests of a round: adapters and the base by turns, prompts that no round has had before."""
    source = random.Random(round_number)
    names = (*NAMES, None)
    return [
        (names[number % len(names)], [source.randrange(1000, 40_000) for _ in range(length)])
        for number in range(streams)
    ]


def through_engine(llm: LLM, requests: list[tuple[str | None, list[int]]], count: int) -> tuple[float, list[Any]]:
    loras = {name: LoRARequest(name, number, str(ADAPTERS / name)) for number, name in enumerate(NAMES, start=1)}
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(
        [prompt for _, prompt in requests],
        params,
        use_tqdm=False,
        lora_request=[name and loras[name] for name, _ in requests],
    )
    seconds = time.perf_counter() - began
    return seconds, [tuple(output.outputs[0].token_ids) for output in outputs]


def through_server(url: str, requests: list[tuple[str | None, list[int]]], count: int) -> tuple[float, list[Any]]:
    bodies = [
        {
            "model": name or SETTINGS["served_model_name"], "prompt": prompt, "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }
        for name, prompt in requests
    ]  # fmt: skip

    async def ask() -> tuple[float, list[Answer]]:
        client = Client(url)
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(client.send("POST", "/v1/completions", json.dumps(body).encode(), 600) for body in bodies)
        )
        seconds = time.perf_counter() - began
        client.close()
        return seconds, answers

    seconds, answers = asyncio.run(ask())
    return seconds, [tokens_of(answer, True) for answer in answers]


def cpu_seconds(server: Server) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def idle(server: Server, connections: int, seconds: float) -> dict[str, float]:
    """CPU seconds of the server with connections that nobody uses; each has had one answer before."""
    host, port = server.url.removeprefix("http://").split(":")
    ask = f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    streams = []
    for _ in range(connections):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(ask)
        await reader.readuntil(b"\r\n\r\n")
        streams.append((reader, writer))
    await asyncio.sleep(1)
    before = cpu_seconds(server)
    await asyncio.sleep(seconds)
    used = cpu_seconds(server) - before
    still_open = sum(not reader.at_eof() for reader, _ in streams)
    for _, writer in streams:
        writer.close()
    return {"connections": connections, "still_open": still_open, "seconds": seconds, "cpu_seconds": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=os.environ.get("MANYLORA_SMOLLM2"), help="SmolLM2-135M (or MANYLORA_SMOLLM2)"
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6, help="pairs; which of the two is first alternates")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10)
    arguments = parser.parse_args()
    if not arguments.model:
        parser.error("give --model, or set MANYLORA_SMOLLM2")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    flags = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    modules = [f"{name}={ADAPTERS / name}" for name in NAMES]
    server = Server([arguments.model, "--port", "0", *flags, "--lora-modules", *modules], Path.cwd(), {})
    try:
        with LLM(arguments.model, enable_lora=True, use_tqdm_on_load=False, **SETTINGS) as llm:
            runs: list[dict[str, float]] = []
            # The first pair warms both up.
            for number in range(arguments.rounds + 1):
                requests = asked(number, arguments.streams, arguments.input_len)
                done, used = {}, {}
                for side in ("engine", "http") if number % 2 else ("http", "engine"):
                    before = time.process_time(), cpu_seconds(server)
                    if side == "engine":
                        done[side] = through_engine(llm, requests, arguments.output_len)
                    else:
                        done[side] = through_server(server.url, requests, arguments.output_len)
                    used[side] = time.process_time() - before[0], cpu_seconds(server) - before[1]
                assert done["http"][1] == done["engine"][1], "the server's tokens are not the engine's"
                rates = {
                    side: arguments.streams * arguments.output_len / seconds for side, (seconds, _) in done.items()
                }
                runs.append(
                    {
                        **rates,
                        "ratio": rates["http"] / rates["engine"],
                        "engine_cpu_seconds": used["engine"][0],
                        "server_cpu_seconds": used["http"][1],
                        "client_cpu_seconds": used["http"][0],
                    }
                )
        runs = runs[1:]
        idles = [asyncio.run(idle(server, count, arguments.seconds)) for count in (0, arguments.connections)]
    finally:
        server.close()
    result = {
        "streams": arguments.streams,
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
        "engine_tokens_per_second": statistics.median(run["engine"] for run in runs),
        "http_tokens_per_second": statistics.median(run["http"] for run in runs),
        "http_over_engine": statistics.median(run["ratio"] for run in runs),
        "runs": runs,
        "idle": idles,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
