"""Solo equals batched, bit for bit (promise P3): tokens, text and logprobs, whatever else is in the batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conftest import MIB, MakeEngine, adapter_path, answer, greedy, logits_of, lora
from manylora import LLM, LoRARequest, SamplingParams

ADAPTERS = {
    "llama": ["alpha", "beta", "rank1", "rank5", "layers-0", "embed-head", "sub-kv"],
    "llama-tied": ["alpha", "head-only", "embed-only"],
    "llama-odd": ["alpha", "beta", "rank3-rs", "rank7-embed-head"],
}


class Rows:
    """A seeded mix of prompts, adapters and sampling parameters on one base."""

    def __init__(self, base: str, count: int, seed: int, longest: int = 60):
        source = random.Random(seed)
        names = ADAPTERS[base]
        loras = [LoRARequest(name, number, adapter_path(name, base)) for number, name in enumerate(names, start=1)]
        self.base = base
        self.prompts = [[source.randrange(3, 288) for _ in range(source.randint(1, longest))] for _ in range(count)]
        # A few rows share a prompt, with one adapter and with different ones.
        self.prompts[1] = self.prompts[0]
        self.prompts[2] = self.prompts[0]
        self.loras = [source.choice([None, *loras]) for _ in range(count)]
        self.loras[1] = self.loras[0]
        self.params = [
            SamplingParams(
                temperature=source.choice([0.0, 0.7, 1.3]),
                top_k=source.choice([0, 20]),
                top_p=source.choice([1.0, 0.9]),
                presence_penalty=source.choice([0.0, 0.5]),
                max_tokens=source.randint(1, 20),
                seed=source.randrange(1000),
                logprobs=2,
                prompt_logprobs=source.choice([None, None, 1]),
            )
            for _ in range(count)
        ]

    def run(self, llm: LLM, order: list[int] | None = None) -> list[Any]:
        """Run all rows in one call, in an order; answers come back in the original order."""
        order = list(range(len(self.prompts))) if order is None else order
        outputs = llm.generate(
            [self.prompts[i] for i in order],
            [self.params[i] for i in order],
            use_tqdm=False,
            lora_request=[self.loras[i] for i in order],
        )
        answers = dict(zip(order, map(answer, outputs), strict=True))
        return [answers[i] for i in range(len(self.prompts))]

    def run_solo(self, llm: LLM) -> list[Any]:
        """Run the rows one after the other."""
        return [
            answer(llm.generate(prompt, params, use_tqdm=False, lora_request=request)[0])
            for prompt, params, request in zip(self.prompts, self.params, self.loras, strict=True)
        ]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("base", sorted(ADAPTERS))
def test_a_mixed_batch_equals_solo_runs(base: str, seed: int, make_engine: MakeEngine) -> None:
    rows = Rows(base, count=14, seed=seed)
    expected = rows.run_solo(make_engine(base, max_num_seqs=1, enable_prefix_caching=False, num_threads=1))
    order = list(range(14))
    random.Random(seed).shuffle(order)

    plain = make_engine(base)
    assert rows.run(plain) == expected
    # Again, with every prefix in the cache, in another order.
    assert rows.run(plain, order) == expected
    assert plain.llm_engine.stats()["prefix_cache_hits"] > 0
    assert rows.run(make_engine(base, num_threads=2), order[::-1]) == expected
    # Chunks of five tokens over three sequences at once.
    assert rows.run(make_engine(base, max_num_batched_tokens=5, max_num_seqs=3), order) == expected
    assert rows.run(make_engine(base, max_loras=1, max_cpu_loras=2), order) == expected


def test_preempted_requests_equal_undisturbed_ones(make_engine: MakeEngine) -> None:
    rows = Rows("llama", count=16, seed=7, longest=40)
    for params in rows.params:
        params.max_tokens, params.ignore_eos = 40, True
    expected = rows.run_solo(make_engine(max_num_seqs=1, enable_prefix_caching=False))
    adapters = make_engine()
    for request in filter(None, rows.loras):
        adapters.llm_engine.add_lora(request)
    # Room for all adapters and about three of sixteen sequences.
    room = adapters.llm_engine.stats()["adapter_bytes"] + 16 * adapters.llm_engine.core.info().block_bytes
    tiny = make_engine(kv_cache_memory_bytes=room, max_model_len=96, max_num_batched_tokens=24, max_num_seqs=16)
    assert rows.run(tiny) == expected
    assert tiny.llm_engine.stats()["preemptions"] > 0


def test_a_36_every_order_of_a_mixed_batch(llm: LLM) -> None:
    requests = {"base": None, "alpha": lora("alpha", 1), "beta": lora("beta", 2)}
    prompt, params = [5, 40, 99, 7, 130], greedy(12, logprobs=1)
    solo = {
        name: answer(llm.generate(prompt, params, use_tqdm=False, lora_request=request)[0])
        for name, request in requests.items()
    }
    assert len({str(value) for value in solo.values()}) == 3
    for order in sorted(set(itertools.permutations(["base", "alpha", "beta", "alpha"]))):
        outputs = llm.generate([prompt] * 4, params, use_tqdm=False, lora_request=[requests[name] for name in order])
        assert [answer(output) for output in outputs] == [solo[name] for name in order]
        assert [output.lora_request for output in outputs] == [requests[name] for name in order]


def test_a_37_lora_switched_on_and_idle_changes_nothing(make_engine: MakeEngine) -> None:
    prompt = list(range(5, 60))
    off, empty, idle = make_engine(enable_lora=False), make_engine(), make_engine(max_loras=2)
    for number, name in enumerate(("alpha", "beta"), start=1):
        idle.llm_engine.add_lora(lora(name, number))
    expected = logits_of(off, prompt)
    assert np.array_equal(logits_of(empty, prompt), expected)
    assert np.array_equal(logits_of(idle, prompt), expected)
    params = greedy(24, logprobs=3)
    answers = [answer(engine.generate([prompt], params, use_tqdm=False)[0]) for engine in (off, empty, idle)]
    assert answers[0] == answers[1] == answers[2]


def test_a_38_chunked_and_preempted_prompts_keep_their_adapter(make_engine: MakeEngine) -> None:
    source = random.Random(38)
    prompts = [[source.randrange(3, 288) for _ in range(48)] for _ in range(6)]
    requests = [lora("alpha", 1), lora("beta", 2)] * 3
    params = greedy(30, logprobs=1)
    whole = make_engine().generate(prompts, params, use_tqdm=False, lora_request=requests)
    sizes = make_engine()
    for request in requests:
        sizes.llm_engine.add_lora(request)
    room = sizes.llm_engine.stats()["adapter_bytes"] + 8 * sizes.llm_engine.core.info().block_bytes
    chunked = make_engine(max_num_batched_tokens=5, kv_cache_memory_bytes=room, max_model_len=96, max_num_seqs=4)
    outputs = chunked.generate(prompts, params, use_tqdm=False, lora_request=requests)
    assert [answer(output) for output in outputs] == [answer(output) for output in whole]
    assert chunked.llm_engine.stats()["preemptions"] > 0


def test_a_20_ranks_1_to_64_in_one_batch(make_engine: MakeEngine, oracle: Callable[[str], Any]) -> None:
    llm, expected = make_engine(), oracle("llama")
    names = ["rank1", "rank2", "rank3", "rank5", "rank12", "rank24", "rank48", "rank64"]
    ids = expected.m["prompts"]["mid"]["ids"]
    requests = [lora(name, number) for number, name in enumerate(names, start=1)]
    outputs = llm.generate([ids] * len(names), greedy(16), use_tqdm=False, lora_request=requests)
    for name, output in zip(names, outputs, strict=True):
        assert expected.compare_greedy(name, "mid", output.outputs[0].token_ids) > 8


def test_a_21_two_ranks_alternate_for_every_batch_size(make_engine: MakeEngine) -> None:
    llm = make_engine("llama-odd")
    five, alpha = lora("rank5", 1, "llama-odd"), lora("alpha", 2, "llama-odd")
    prompts = [[3 + 7 * i % 280, 11, 5 + i] for i in range(33)]
    requests = [five if i % 6 in (0, 2, 5) else alpha for i in range(33)]
    params = greedy(4, logprobs=0)
    solo = [
        answer(llm.generate(prompt, params, use_tqdm=False, lora_request=request)[0])
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    for size in range(1, 34):
        outputs = llm.generate(prompts[:size], params, use_tqdm=False, lora_request=requests[:size])
        assert [answer(output) for output in outputs] == solo[:size], size


@pytest.mark.parametrize("n", [2, 4])
def test_a_39_all_samples_of_a_request_use_its_adapter(n: int, llm: LLM) -> None:
    prompt, alpha = [17, 4, 200, 31], lora("alpha", 1)
    params = SamplingParams(n=n, temperature=0.9, seed=3, max_tokens=8, logprobs=0, ignore_eos=True)
    together = llm.generate([prompt, prompt], params, use_tqdm=False, lora_request=[alpha, None])
    assert [sample.index for sample in together[0].outputs] == list(range(n))
    alone = llm.generate(prompt, params, use_tqdm=False, lora_request=alpha)
    assert answer(together[0]) == answer(alone[0])
    assert answer(together[0]) != answer(together[1])
    # Logprobs tell the adapter: each sample's first token has the logprob that the adapter's logits give it.
    logits = logits_of(llm, prompt, "alpha")[-1].astype("f8")
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    for sample in together[0].outputs:
        token = sample.token_ids[0]
        assert abs(sample.logprobs[0][token].logprob - expected[token]) < 1e-4
    assert len({tuple(sample.token_ids) for sample in together[0].outputs}) > 1


def test_a_39_prompt_logprobs_with_two_adapters(llm: LLM, oracle: Callable[[str], Any]) -> None:
    expected = oracle("llama")
    ids = expected.m["prompts"]["mid"]["ids"]
    outputs = llm.generate(
        [ids] * 3, greedy(1, prompt_logprobs=0), use_tqdm=False, lora_request=[lora("alpha", 1), lora("beta", 2), None]
    )
    for name, output in zip(("alpha", "beta", None), outputs, strict=True):
        expected.compare_logprobs(
            name, "mid", [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        )


def test_a_40_prefixes_are_shared_only_within_one_adapter(make_engine: MakeEngine) -> None:
    llm, cold = make_engine(), make_engine(enable_prefix_caching=False)
    prompt = [3 + 5 * i % 280 for i in range(64)]
    requests = [lora("alpha", 1), lora("beta", 2), None, lora("alpha", 1), None]
    hits = []
    for request in requests:
        (output,) = llm.generate(prompt, greedy(6, logprobs=1), use_tqdm=False, lora_request=request)
        hits.append(output.num_cached_tokens)
        assert answer(output) == answer(
            cold.generate(prompt, greedy(6, logprobs=1), use_tqdm=False, lora_request=request)[0]
        )
    # The last token is always computed, so a prompt of exactly four blocks reuses three.
    assert hits == [0, 0, 0, 48, 48]
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, greedy(1), use_tqdm=False)[0].num_cached_tokens == 0


def test_cache_salts_keep_tenants_apart(llm: LLM) -> None:
    prompt = [3 + 5 * i % 280 for i in range(64)]
    salts = ["one", "two", None, "one", None]
    hits = []
    for salt in salts:
        request: dict[str, Any] = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        hits.append(llm.generate(request, greedy(1), use_tqdm=False)[0].num_cached_tokens)
    assert hits == [0, 0, 0, 48, 48]


def test_seeds_make_samples_reproducible_whatever_the_batch(make_engine: MakeEngine) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=10, ignore_eos=True)
    prompts = [[9, 8, 7], [20, 21], [5] * 12]
    one, other = make_engine(), make_engine(max_num_seqs=2, max_num_batched_tokens=4)
    first = [output.outputs[0].token_ids for output in one.generate(prompts, params, use_tqdm=False)]
    assert [output.outputs[0].token_ids for output in other.generate(prompts[::-1], params, use_tqdm=False)] == first[
        ::-1
    ]
    unseeded = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    runs = [one.generate(prompts[0], unseeded, use_tqdm=False)[0].outputs[0].token_ids for _ in range(3)]
    assert len({tuple(run) for run in runs}) > 1


def test_many_sequences_share_a_small_engine(make_engine: MakeEngine) -> None:
    llm = make_engine(max_num_seqs=3, kv_cache_memory_bytes=MIB, max_model_len=64)
    prompts = [[3 + i, 4 + i, 5] for i in range(40)]
    together = llm.generate(prompts, greedy(3), use_tqdm=False)
    for prompt, output in list(zip(prompts, together, strict=True))[::7]:
        assert output.prompt_token_ids == prompt
        assert answer(llm.generate(prompt, greedy(3), use_tqdm=False)[0]) == answer(output)
