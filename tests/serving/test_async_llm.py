"""`AsyncLLM` under event loops: what comes, what is cancelled, and that nothing waits in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from manylora import (
    AsyncEngineArgs,
    AsyncLLM,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    ValidationError,
    async_llm,
)
from manylora.engine.submission import submit
from manylora.exceptions import AdapterError, EngineStoppedError
from manylora.sampling_params import RequestOutputKind

from .test_llm_engine import ARGUMENTS_OF_TESTS, ORACLE, PROMPT, greedy, lora

FINAL = RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**ARGUMENTS_OF_TESTS))
    yield engine
    engine.shutdown()


async def collected(engine: AsyncLLM, prompt: Any, params: Any, name: str, **fields: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name, **fields)]


async def tokens(engine: AsyncLLM, name: str, request: LoRARequest | None, count: int = 16) -> list[int]:
    (output,) = await collected(engine, PROMPT, greedy(count, FINAL), name, lora_request=request)
    return output.outputs[0].token_ids


async def until(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_grammars_are_compiled_off_the_loop(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_loop = []

    def noted(*args: Any, **fields: Any) -> Any:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return submit(*args, **fields)

    monkeypatch.setattr(async_llm, "submit", noted)
    must = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[ab]{3}"))
    for params in (greedy(2, FINAL), must):
        (*_, output) = asyncio.run(collected(engine, PROMPT, params, "one"))
    assert output.outputs[0].text.strip("ab") == ""
    assert on_the_loop == [True, False]


def test_streams_of_each_kind_agree(engine: AsyncLLM) -> None:
    async def all_kinds() -> list[list[RequestOutput]]:
        return await asyncio.gather(
            *(
                collected(engine, PROMPT, greedy(480, kind, logprobs=1), kind.name, lora_request=lora("alpha", 1))
                for kind in (FINAL, RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA)
            )
        )

    async def run() -> None:
        # On a busy machine all of it may be there before the loop first looks.
        for _ in range(10):
            final, cumulative, delta = await all_kinds()
            if min(len(cumulative), len(delta)) > 1:
                break
        (whole,) = final
        sample = whole.outputs[0]
        assert len(sample.token_ids) == 480
        assert len(cumulative) > 1
        assert len(delta) > 1
        last = cumulative[-1].outputs[0]
        assert (last.token_ids, last.text, last.logprobs) == (sample.token_ids, sample.text, sample.logprobs)
        assert "".join(item.outputs[0].text for item in delta) == sample.text
        assert [token for item in delta for token in item.outputs[0].token_ids] == sample.token_ids
        for outputs in (final, cumulative, delta):
            assert [item.finished for item in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[-1].outputs[0].finish_reason == "length"

    asyncio.run(run())


def test_many_at_once_get_what_each_gets_alone_and_no_thread_each(engine: AsyncLLM) -> None:
    adapters = [None, lora("alpha", 1), lora("beta", 2)]

    async def run() -> None:
        alone = [await tokens(engine, f"alone-{number}", adapter) for number, adapter in enumerate(adapters)]
        assert len({tuple(item) for item in alone}) == 3
        before = threading.active_count()
        most = before
        asked = [asyncio.create_task(tokens(engine, str(number), adapters[number % 3])) for number in range(96)]
        while not all(task.done() for task in asked):
            most = max(most, threading.active_count())
            await asyncio.sleep(0.001)
        for number, task in enumerate(asked):
            assert task.result() == alone[number % 3]
        assert most == before

    asyncio.run(run())


def test_the_loop_goes_on_while_requests_run(engine: AsyncLLM) -> None:
    async def run() -> None:
        task = asyncio.create_task(tokens(engine, "long", None, 400))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(task.result()) == 400
        assert turns > 400

    asyncio.run(run())


def many(count: int = 500) -> SamplingParams:
    """Sixteen samples, which take hundreds of steps and a while."""
    return SamplingParams(n=16, max_tokens=count, ignore_eos=True, seed=1)


def test_a_cancelled_task_stops_its_request_at_once(engine: AsyncLLM) -> None:
    async def run() -> None:
        before = engine.llm_engine.stats()["steps"]
        tasks = [asyncio.create_task(collected(engine, PROMPT, many(), f"c{number}")) for number in range(4)]
        await until(lambda: engine.llm_engine.stats()["running"] == 64)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: engine.llm_engine.stats()["running"] == 0)
        # Each had 500 steps before it.
        assert engine.llm_engine.stats()["steps"] - before < 400
        # The names are free again.
        assert await tokens(engine, "c0", None, 2)

    asyncio.run(run())


def test_who_stops_reading_stops_the_request(engine: AsyncLLM) -> None:
    async def run() -> None:
        before = engine.llm_engine.stats()["steps"]
        outputs = engine.generate(PROMPT, many(), "left")
        async for _ in outputs:
            break
        assert engine.llm_engine.stats()["running"] == 16
        await outputs.aclose()
        await until(lambda: engine.llm_engine.stats()["running"] == 0)
        assert engine.llm_engine.stats()["steps"] - before < 400

    asyncio.run(run())


def test_abort_ends_the_iterator_with_what_there_is(engine: AsyncLLM) -> None:
    async def run() -> None:
        outputs = []
        async for output in engine.generate(PROMPT, many(), "aborted"):
            outputs.append(output)
            if len(outputs) == 3:
                await engine.abort(["aborted", "no such request"])
        assert outputs[-1].finished
        for sample in outputs[-1].outputs:
            assert sample.finish_reason == "abort"
            assert 0 < len(sample.token_ids) < 500

    asyncio.run(run())


def test_what_is_wrong_is_raised_to_who_asked(engine: AsyncLLM) -> None:
    async def run() -> None:
        wrong: list[tuple[Any, Any, Any, dict[str, Any], type[Exception], str]] = [
            ([], greedy(2), "w", {}, ValidationError, "empty"),
            (PROMPT, "none", "w", {}, ValidationError, "must be SamplingParams"),
            (PROMPT, greedy(2), 7, {}, ValidationError, "request_id must be a string"),
            (PROMPT, greedy(2), "w", {"lora_request": "alpha"}, ValidationError, "must be LoRARequest"),
            (PROMPT, greedy(2), "w", {"lora_request": LoRARequest("x", 9, "/nowhere")}, AdapterError, "/nowhere"),
            (PROMPT, greedy(2), "w", {"data_parallel_rank": 0}, ValidationError, "one device"),
        ]
        for prompt, params, name, fields, kind, told in wrong:
            with pytest.raises(kind, match=told):
                await collected(engine, prompt, params, name, **fields)
        running = engine.generate(PROMPT, greedy(64), "taken")
        outputs = [await anext(running)]
        with pytest.raises(ValidationError, match="Request id taken already running"):
            await collected(engine, PROMPT, greedy(2), "taken")
        outputs += [output async for output in running]
        assert outputs[-1].finished
        assert (await collected(engine, PROMPT, greedy(2), "taken"))[-1].finished

    asyncio.run(run())


def test_adapters_are_managed_while_requests_run(engine: AsyncLLM) -> None:
    async def run() -> None:
        task = asyncio.create_task(tokens(engine, "beside", None, 200))
        gamma = lora("gamma", 33)
        assert await engine.add_lora(gamma)
        assert 33 in await engine.list_loras()
        assert await engine.pin_lora(33)
        first = await tokens(engine, "gamma", gamma)
        assert await engine.unpin_lora(33)
        other = LoRARequest("gamma", 33, str(ORACLE / "llama" / "adapters" / "alpha"))
        assert await engine.replace_lora(other)
        assert await tokens(engine, "gamma", other) != first
        assert await engine.remove_lora(33)
        assert not await engine.remove_lora(33)
        assert 33 not in await engine.list_loras()
        assert len(await task) == 200

    asyncio.run(run())


def test_a_second_loop_and_two_at_a_time(engine: AsyncLLM) -> None:
    expected = asyncio.run(tokens(engine, "first", None))
    found: dict[int, list[int]] = {}

    def run(number: int) -> None:
        found[number] = asyncio.run(tokens(engine, f"loop-{number}", None))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == dict.fromkeys(range(4), expected)


def test_the_rest_of_the_surface(engine: AsyncLLM) -> None:
    async def run() -> None:
        await engine.check_health()
        assert engine.is_running
        assert not engine.is_stopped
        assert not engine.errored
        tokenizer = await engine.get_tokenizer()
        (output,) = await collected(engine, "hello", SamplingParams(max_tokens=2, output_kind=FINAL), "text")
        assert output.prompt == "hello"
        assert output.prompt_token_ids == tokenizer.encode("hello")
        assert (await collected(engine, "hello", None, "defaults"))[-1].finished
        assert await engine.reset_prefix_cache()
        assert not await engine.is_tracing_enabled()
        with pytest.raises(ValidationError, match=r"AsyncLLM\.encode\(\) is not supported"):
            engine.encode()

    asyncio.run(run())


def test_health_waits_for_nobody(engine: AsyncLLM) -> None:
    async def run() -> None:
        threads = concurrent.futures.ThreadPoolExecutor()
        threads.shutdown()
        # Whoever needs a thread fails from here on.
        asyncio.get_running_loop().set_default_executor(threads)
        await engine.check_health()
        with pytest.raises(RuntimeError):
            await engine.reset_prefix_cache()

    asyncio.run(run())


def test_shutting_down_ends_what_runs() -> None:
    engine = AsyncLLM.from_engine_args(ARGUMENTS_OF_TESTS)

    async def run() -> None:
        task = asyncio.create_task(collected(engine, PROMPT, greedy(500), "one"))
        await until(lambda: engine.llm_engine.stats()["running"] == 1)
        engine.shutdown()
        with pytest.raises(EngineStoppedError):
            await asyncio.wait_for(task, 10)
        with pytest.raises(EngineStoppedError):
            await engine.check_health()
        with pytest.raises(EngineStoppedError):
            await collected(engine, PROMPT, greedy(2), "two")

    asyncio.run(run())
    assert engine.is_stopped
    assert not engine.is_running
    assert isinstance(engine.dead_error, EngineStoppedError)
