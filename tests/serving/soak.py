"""Many clients on adapters that come, go and change: every answer is checked against the solo run of what it may be of.

The test runs it for a minute, `benches/serving/soak.py` for as long as one likes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from manylora import LLM, LoRARequest, SamplingParams
from manylora.bench.client import Answer, Client
from manylora.bench.measure import EventReader

from .conftest import ADAPTERS, ORACLE, Server

NAMES = [f"tenant-{number:02}" for number in range(20)]
SOURCES = ("alpha", "beta", "gamma", "small", "qv", "rank5", "rank12", "all-linear", "fleet-00", "fleet-03")
PROMPTS = [[5, 40, 99, 7, 130], [200, 3, 77], [9 + 11 * number % 270 for number in range(40)]]
TOKENS = 12
MIB = 1 << 20


def flags(folder: Path) -> list[str]:
    """A server with room and places for half of the adapters, and slots for less."""
    return ["--lora-root", str(folder), "--max-loras", "6", "--max-cpu-loras", "10", "--lora-memory-bytes", "140000"]


@dataclass(frozen=True)
class Content:
    """What an adapter's name may stand for.

    Attributes:
        folder: where it is.
        version: its digest.
        answers: its tokens after each prompt, alone in an engine.

    """

    folder: str
    version: str
    answers: tuple[tuple[int, ...], ...]


def make_contents(folder: Path) -> tuple[dict[str, list[Content]], tuple[tuple[int, ...], ...]]:
    """Make two adapters for each name and run each alone; also return the base's answers.

    No two of all these answers are the same, or a wrong one could pass for a right one.
    """
    llm = LLM(
        str(ORACLE / "llama" / "base"), device="cpu", dtype="float32", enable_lora=True, max_lora_rank=64,
        kv_cache_memory_bytes=32 * MIB, use_tqdm_on_load=False, served_model_name="oracle/llama",
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

    def answers(request: LoRARequest | None) -> tuple[tuple[int, ...], ...]:
        runs = (llm.generate(prompt, params, use_tqdm=False, lora_request=request)[0] for prompt in PROMPTS)
        return tuple(tuple(run.outputs[0].token_ids) for run in runs)

    contents: dict[str, list[Content]] = {}
    with llm:
        base = answers(None)
        for number, name in enumerate(NAMES):
            contents[name] = []
            for side in range(2):
                target = folder / f"{name}-{'ab'[side]}"
                shutil.copytree(ADAPTERS / SOURCES[number % len(SOURCES)], target)
                file = target / "adapter_model.safetensors"
                noise = np.random.default_rng(100 * number + side)
                tensors = {key: value + noise.normal(0, 0.15, value.shape) for key, value in load_file(file).items()}
                save_file({key: value.astype("f4") for key, value in tensors.items()}, file)
                request = LoRARequest("probe", 1, str(target))
                version = llm.llm_engine.replace_lora(request)
                contents[name].append(Content(target.name, version, answers(request)))
    for prompt in range(len(PROMPTS)):
        every = [content.answers[prompt] for both in contents.values() for content in both] + [base[prompt]]
        assert len(set(every)) == len(every), "two adapters answer alike"
    shutil.copytree(ADAPTERS / "alpha", folder / "broken")
    file = folder / "broken" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return contents, base


@dataclass
class Binding:
    """What a name may stand for at the moment: more than one thing while a change is under way, None being nothing."""

    possible: set[Content | None] = field(default_factory=lambda: {None})
    watched: list[set[Content | None]] = field(default_factory=list)

    def may_become(self, content: Content | None) -> None:
        self.possible.add(content)
        for seen in self.watched:
            seen.add(content)

    def is_now(self, content: Content | None) -> None:
        self.possible = {content}

    @contextmanager
    def seen(self) -> Iterator[set[Content | None]]:
        """What it may stand for from now to the end of the block."""
        seen = set(self.possible)
        self.watched.append(seen)
        try:
            yield seen
        finally:
            # By identity: equal sets are common.
            self.watched = [other for other in self.watched if other is not seen]


class Soak:
    """A run of clients and churn against one server."""

    def __init__(
        self, server: Server, contents: dict[str, list[Content]], base: tuple[tuple[int, ...], ...], seed: int = 1
    ):
        self.server = server
        self.contents = contents
        self.base = base
        self.bindings = {name: Binding() for name in NAMES}
        self.client = Client(server.url)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[int] = []
        self.descriptors: list[int] = []
        self.source = random.Random(seed)
        self.is_over = False

    def run(self, seconds: float, clients: int = 200, churners: int = 4) -> dict[str, Any]:
        """Run, and return what happened; `wrong` has every answer that should not have been."""
        asyncio.run(self._run(seconds, clients, churners))
        third = len(self.memory) // 3
        early, late = max(self.memory[third : 2 * third]), max(self.memory[2 * third :])
        return {
            "seconds": seconds,
            "clients": clients,
            "counts": dict(sorted(self.counts.items())),
            "wrong": self.wrong,
            "resident_mib": {"middle_third": early / MIB, "last_third": late / MIB, "growth": (late - early) / MIB},
            "descriptors": {"most": max(self.descriptors), "last": self.descriptors[-1]},
        }

    async def _run(self, seconds: float, clients: int, churners: int) -> None:
        for name in NAMES:
            await self._load(name, self.contents[name][0])
        tasks = [asyncio.create_task(self._ask_on(number)) for number in range(clients)]
        tasks += [asyncio.create_task(self._churn(NAMES[number::churners])) for number in range(churners)]
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end and not any(task.done() for task in tasks):
            self._note_size()
            await asyncio.sleep(min(0.5, seconds / 60))
        self.is_over = True
        await asyncio.gather(*tasks)
        for name in NAMES:
            if self.bindings[name].possible != {None}:
                await self._unload(name)
        self.client.close()

    def _note_size(self) -> None:
        process = Path(f"/proc/{self.server.process.pid}")
        self.memory.append(int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        self.descriptors.append(len(os.listdir(process / "fd")))

    # -- clients ---------------------------------------------------------------------------------------------------

    async def _ask_on(self, number: int) -> None:
        step = number
        while not self.is_over:
            step += 1
            # Every client goes through all adapters, each in its own place; now and then the base.
            if step % 23 == 0:
                await self._ask_base(step % len(PROMPTS), step % 2 == 0)
            else:
                await self._ask(NAMES[step % len(NAMES)], step % len(PROMPTS), step // 3 % 2 == 0)

    async def _post(self, model: str, prompt: int, streams: bool) -> Answer:
        body = {
            "model": model, "prompt": PROMPTS[prompt], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": streams,
        }  # fmt: skip
        return await self.client.send("POST", "/v1/completions", json.dumps(body).encode(), 120)

    async def _ask_base(self, prompt: int, streams: bool) -> None:
        answer = await self._post("base", prompt, streams)
        if answer.status != 200 or tokens_of(answer, streams) != self.base[prompt]:
            self._tell("base", answer, set())
        self.counts["answers of the base"] += 1

    async def _ask(self, name: str, prompt: int, streams: bool) -> None:
        with self.bindings[name].seen() as seen:
            answer = await self._post(name, prompt, streams)
        if answer.status == 404 and None in seen:
            error = json.loads(answer.body)["error"]
            if (error["code"], error["type"], error["param"]) != (404, "NotFoundError", "model"):
                self._tell(name, answer, seen)
            self.counts["404 while it was away"] += 1
            return
        version = answer.headers.get("x-manylora-adapter-version")
        served = next((content for content in seen if content is not None and content.version == version), None)
        if answer.status != 200 or served is None or tokens_of(answer, streams) != served.answers[prompt]:
            self._tell(name, answer, seen)
        self.counts["streams" if streams else "whole answers"] += 1
        if len(seen) > 1:
            self.counts["answers during a change"] += 1

    def _tell(self, name: str, answer: Answer, seen: set[Content | None]) -> None:
        may_be = sorted(content.folder if content else "nothing" for content in seen)
        said = answer.body.decode(errors="replace")[:300]
        version = answer.headers.get("x-manylora-adapter-version")
        self.wrong.append(f"{name} (may be {may_be}, version {version}): {answer.status} {said}")

    # -- churn -----------------------------------------------------------------------------------------------------

    async def _churn(self, names: list[str]) -> None:
        while not self.is_over:
            name = self.source.choice(names)
            (current,) = self.bindings[name].possible
            drawn = self.source.random()
            if current is None:
                await self._load(name, self.source.choice(self.contents[name]))
            elif drawn < 0.3:
                await self._unload(name)
            elif drawn < 0.4:
                await self._fail_to_replace(name)
            else:
                await self._load(name, self.source.choice(self.contents[name]))
            await asyncio.sleep(self.source.uniform(0, 0.05))

    async def _manage(self, call: str, **fields: Any) -> Answer:
        return await self.client.send("POST", f"/v1/{call}_lora_adapter", json.dumps(fields).encode(), 120)

    async def _load(self, name: str, content: Content) -> None:
        binding = self.bindings[name]
        (before,) = binding.possible
        kind = "loads" if before is None else "replacements"
        binding.may_become(content)
        answer = await self._manage("load", lora_name=name, lora_path=content.folder, load_inplace=True)
        if answer.status == 200:
            binding.is_now(content)
            self.counts[kind] += 1
        else:
            self._tell(f"loading {name}", answer, binding.possible)
            binding.is_now(before)

    async def _unload(self, name: str) -> None:
        binding = self.bindings[name]
        (before,) = binding.possible
        binding.may_become(None)
        answer = await self._manage("unload", lora_name=name)
        if answer.status == 200:
            binding.is_now(None)
            self.counts["unloads"] += 1
        else:
            self._tell(f"unloading {name}", answer, binding.possible)
            binding.is_now(before)

    async def _fail_to_replace(self, name: str) -> None:
        answer = await self._manage("load", lora_name=name, lora_path="broken", load_inplace=True)
        if answer.status != 400:
            self._tell(f"replacing {name} with a broken one", answer, self.bindings[name].possible)
        self.counts["refused replacements"] += 1


def tokens_of(answer: Answer, streams: bool) -> tuple[int, ...] | None:
    """The tokens of a good answer; None of one that is cut short or has an error in it."""
    if not streams:
        (choice,) = json.loads(answer.body)["choices"]
        return tuple(choice["token_ids"]) if choice["finish_reason"] == "length" else None
    events = [*EventReader().feed(answer.body)]
    if not events or events.pop() != "[DONE]":
        return None
    tokens: list[int] = []
    reason = None
    for event in map(json.loads, events):
        if "error" in event:
            return None
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
            reason = choice["finish_reason"] or reason
    return tuple(tokens) if reason == "length" else None
