"""The surface of `LLM`: forms of prompts, outputs, chat, stopping, enqueueing, interruption."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tqdm.auto import tqdm

from conftest import ORACLE, MakeEngine, adapter_path, answer, greedy, logits_of, lora
from manylora import (
    LLM,
    CompletionOutput,
    LoRARequest,
    ManyLoRAError,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
    ValidationError,
)
from manylora.engine import Request

CONVERSATION = [{"role": "user", "content": "How many orders were paid in Vienna?"}]


def test_prompts_may_be_text_token_ids_or_dictionaries(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("The river")
    forms: list[Any] = ["The river", ids, {"prompt": "The river"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, greedy(5), use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["The river", None, "The river", None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    for form in forms:
        (alone,) = llm.generate(form, greedy(5), use_tqdm=False)
        assert alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert llm.generate([], greedy(5), use_tqdm=False) == []


def test_outputs_have_vllms_fields_and_echo_the_request(llm: LLM) -> None:
    request = LoRARequest("alpha", 3, adapter_path("alpha"), base_model_name="lineage")
    with_adapter, base = llm.generate([[5, 6], [5, 6]], greedy(4), use_tqdm=False, lora_request=[request, None])
    assert isinstance(with_adapter, RequestOutput)
    assert with_adapter.finished
    echoed = with_adapter.lora_request
    assert (echoed.lora_name, echoed.lora_int_id, echoed.lora_path) == ("alpha", 3, request.lora_path)
    assert base.lora_request is None
    assert base.prompt_logprobs is None
    assert base.num_cached_tokens == 0
    (sample,) = with_adapter.outputs
    assert isinstance(sample, CompletionOutput)
    assert sample.finished()
    assert sample.lora_request is echoed
    assert (sample.index, sample.finish_reason, sample.stop_reason) == (0, "length", None)
    assert sample.text == llm.get_tokenizer().decode(sample.token_ids, skip_special_tokens=True)
    assert (sample.logprobs, sample.cumulative_logprob) == (None, None)
    assert int(base.request_id) == int(with_adapter.request_id) + 1
    assert with_adapter.metrics.seconds > 0


def test_outputs_come_back_in_input_order(llm: LLM) -> None:
    # The first takes longest.
    prompts, lengths = [[7 + i] for i in range(9)], [30, 1, 20, 2, 10, 3, 4, 5, 6]
    outputs = llm.generate(prompts, [greedy(length) for length in lengths], use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


def test_logprobs_hold_the_chosen_token_and_the_likeliest(llm: LLM) -> None:
    (output,) = llm.generate([5, 6, 7], greedy(3, logprobs=2, prompt_logprobs=1), use_tqdm=False)
    sample = output.outputs[0]
    total = 0.0
    for token, position in zip(sample.token_ids, sample.logprobs, strict=True):
        assert next(iter(position)) == token
        assert len(position) == 2
        assert position[token].rank == 1
        assert position[token].decoded_token is not None
        assert max(entry.logprob for entry in position.values()) == position[token].logprob <= 0
        total += position[token].logprob
    assert sample.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None
    for token, position in zip([6, 7], output.prompt_logprobs[1:], strict=True):
        assert token in position
        assert any(entry.rank == 1 for entry in position.values())
        assert len(position) in (1, 2)


@pytest.mark.parametrize("name", ["params", "lora_request", "priority"])
def test_a_39_lists_must_have_the_length_of_the_prompts(name: str, llm: LLM) -> None:
    values = {"params": [greedy(1)] * 2, "lora_request": [lora("alpha", 1)] * 2, "priority": [1, 2]}
    arguments = {"sampling_params" if name == "params" else name: values[name]}
    with pytest.raises(ValidationError) as refusal:
        llm.generate([[1], [2], [3]], use_tqdm=False, **arguments)
    assert str(refusal.value) == f"The lengths of prompts (3) and {name} (2) must be the same."
    assert isinstance(refusal.value, ValueError)
    assert llm.llm_engine.list_loras() == set()


def test_a_request_with_an_adapter_needs_lora_enabled(make_engine: MakeEngine) -> None:
    llm = make_engine(enable_lora=False)
    with pytest.raises(ValidationError, match="but LoRA is not enabled!"):
        llm.generate([5], use_tqdm=False, lora_request=lora("alpha", 1))
    with pytest.raises(ValidationError, match="but LoRA is not enabled!"):
        llm.llm_engine.add_lora(lora("alpha", 1))


def test_chat_uses_the_template_of_the_model(llm: LLM) -> None:
    text = "<|im_start|>user\nHow many orders were paid in Vienna?<|im_end|>\n<|im_start|>assistant\n"
    (chatted,) = llm.chat(CONVERSATION, greedy(6), use_tqdm=False)
    (generated,) = llm.generate(text, greedy(6), use_tqdm=False)
    assert chatted.prompt == text
    assert chatted.prompt_token_ids == generated.prompt_token_ids
    assert answer(chatted) == answer(generated)
    two = llm.chat([CONVERSATION, CONVERSATION], greedy(6), use_tqdm=False, lora_request=[lora("alpha", 1), None])
    assert answer(two[1]) == answer(chatted)
    assert answer(two[0]) != answer(chatted)


def test_chat_arguments_reach_the_template(llm: LLM) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ mood }}{{ tools }}"
    (output,) = llm.chat(
        CONVERSATION[:1],
        greedy(1),
        use_tqdm=False,
        chat_template=template,
        chat_template_kwargs={"mood": "calm"},
        tools=[{"type": "function"}],
    )
    assert output.prompt.startswith("<|endoftext|>[user:How many orders were paid in Vienna?]calm")
    assert "function" in output.prompt
    unfinished = [*CONVERSATION, {"role": "assistant", "content": "There were"}]
    (output,) = llm.chat(
        unfinished, greedy(1), use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    assert output.prompt.endswith("assistant\nThere were")
    with pytest.raises(ValidationError, match="add_generation_prompt=False"):
        llm.chat(unfinished, greedy(1), use_tqdm=False, continue_final_message=True)
    with pytest.raises(ValidationError, match="chat_template_content_format"):
        llm.chat(CONVERSATION, chat_template_content_format="xml")
    with pytest.raises(ValidationError, match="messages"):
        llm.chat("hello", use_tqdm=False)
    with pytest.raises(ValidationError, match="plain data"):
        llm.chat([{"role": "user", "content": object()}], use_tqdm=False)


def test_chat_template_of_the_engine_replaces_the_models(make_engine: MakeEngine, tmp_path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}!\n")
    for template in (str(file), file.read_text()):
        (output,) = make_engine(chat_template=template).chat(CONVERSATION, greedy(1), use_tqdm=False)
        assert output.prompt.startswith("How many orders were paid in Vienna?!")


def test_a_47_stop_strings_are_found_across_tokens(llm: LLM) -> None:
    (free,) = llm.generate("The river", greedy(40), use_tqdm=False)
    text, pieces = free.outputs[0].text, [llm.get_tokenizer().decode([token]) for token in free.outputs[0].token_ids]
    # A string that begins in one token and ends in a later one.
    position = next(i for i in range(4, 30) if text[i : i + 3].strip() and text.find(text[i : i + 3]) == i)
    stop = text[position : position + 3]
    assert stop not in pieces
    for request in (None, lora("null", 1)):
        (stopped,) = llm.generate("The river", greedy(40, stop=stop), use_tqdm=False, lora_request=request)
        sample = stopped.outputs[0]
        assert sample.text == text[:position]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        params = greedy(40, stop=["never there", stop], include_stop_str_in_output=True)
        (kept,) = llm.generate("The river", params, use_tqdm=False, lora_request=request)
        assert kept.outputs[0].text == text[:position] + stop


def test_tokens_stop_an_answer(llm: LLM) -> None:
    free = llm.generate([5, 6], greedy(20), use_tqdm=False)[0].outputs[0].token_ids
    token = free[5]
    first = free.index(token)
    sample = llm.generate([5, 6], greedy(20, stop_token_ids=[token]), use_tqdm=False)[0].outputs[0]
    assert sample.token_ids == free[: first + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", token)
    later = llm.generate([5, 6], greedy(20, stop_token_ids=[token], min_tokens=first + 3), use_tqdm=False)[0].outputs[0]
    assert len(later.token_ids) >= first + 3
    # The end token of the model, made certain.
    bias = SamplingParams(temperature=0, max_tokens=9, logit_bias={2: 100})
    sample = llm.generate([5, 6], bias, use_tqdm=False)[0].outputs[0]
    assert (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason) == ([2], "", "stop", None)
    ignoring = SamplingParams(temperature=0, max_tokens=9, logit_bias={2: 100}, ignore_eos=True)
    sample = llm.generate([5, 6], ignoring, use_tqdm=False)[0].outputs[0]
    assert (sample.token_ids, sample.finish_reason) == ([2] * 9, "length")


def test_tokens_are_forced_forbidden_and_favoured(llm: LLM) -> None:
    def run(**fields: Any) -> list[int]:
        return llm.generate([5, 6], greedy(8, **fields), use_tqdm=False)[0].outputs[0].token_ids

    free = run()
    assert set(run(allowed_token_ids=[70, 71])) <= {70, 71}
    assert run(logit_bias={99: 100}) == [99] * 8
    assert free[0] not in run(logit_bias={free[0]: -100})
    assert run(logit_bias={"99": 100.0}) == [99] * 8
    word = llm.get_tokenizer().decode([free[0]])
    if word.strip() and "\ufffd" not in word:
        assert run(bad_words=[word])[0] != free[0]
    penalized = run(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=5.0)
    assert len(set(penalized)) >= len(set(free))


def test_defaults_come_from_the_generation_config(make_engine: MakeEngine, tmp_path) -> None:
    import json
    import shutil

    folder = tmp_path / "base"
    shutil.copytree(ORACLE / "llama" / "base", folder)
    config = {"eos_token_id": [2, 70], "temperature": 0.5, "top_k": 7, "top_p": 0.8, "do_sample": True,
              "repetition_penalty": 1.1, "max_new_tokens": 9}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(config))
    llm = make_engine(str(folder))
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.5, 7, 0.8)
    assert (defaults.repetition_penalty, defaults.max_tokens) == (1.1, 9)
    assert len(llm.generate([5], use_tqdm=False)[0].outputs[0].token_ids) <= 9
    # Every end token of the list ends an answer.
    (output,) = llm.generate([5], SamplingParams(temperature=0, logit_bias={70: 100}), use_tqdm=False)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([70], "stop")
    assert make_engine(str(folder), generation_config="vllm").get_default_sampling_params() == SamplingParams()


def test_progress_is_shown_by_whatever_is_asked(llm: LLM, capsys) -> None:
    totals, updates = [], []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **keywords: Any):
            totals.append(keywords["total"])
            super().__init__(*arguments, **keywords, disable=True)

        def update(self, n: float | None = 1) -> bool | None:
            updates.append(n)
            return super().update(n)

    llm.generate([[5], [6], [7]], greedy(2), use_tqdm=Bar)
    assert (totals, sum(updates)) == ([3], 3)
    capsys.readouterr()
    llm.generate([[5]], greedy(2), use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate([[5]], greedy(2))
    assert "Processed prompts" in capsys.readouterr().err


def test_enqueued_requests_come_back_in_order(llm: LLM) -> None:
    expected = [answer(output) for output in llm.generate([[5], [6], [7]], greedy(6), use_tqdm=False)]
    ids = llm.enqueue([[5], [6]], greedy(6))
    ids += llm.enqueue([7], greedy(6), lora_request=lora("null", 1))
    ids += llm.enqueue_chat(CONVERSATION, greedy(6))
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [answer(output) for output in outputs[:3]] == expected
    assert llm.wait_for_completion(use_tqdm=False) == []
    with pytest.raises(ValidationError, match="output_type"):
        llm.wait_for_completion(str)


@pytest.mark.parametrize(
    "name",
    ["beam_search", "encode", "embed", "classify", "score", "reward", "sleep", "wake_up", "collective_rpc",
     "apply_model", "start_profile", "stop_profile", "get_metrics"],
)  # fmt: skip
def test_what_is_not_offered_is_refused_by_name(name: str, llm: LLM) -> None:
    with pytest.raises(ValidationError, match=rf"LLM\.{name}\(\) is not supported: ") as refusal:
        getattr(llm, name)(["prompt"], lora_request=None)
    assert len(str(refusal.value)) > len(f"LLM.{name}() is not supported: ") + 10


def test_priorities_order_the_queue(make_engine: MakeEngine) -> None:
    llm = make_engine(scheduling_policy="priority", max_num_seqs=1)
    # The first one runs while the others arrive.
    requests = [Request(None, False, [5], greedy(500), [], priority, None) for priority in (0, 3, 2, 1)]
    waiting = dict(enumerate(llm.llm_engine.core.submit(requests, stream=False)))
    order = []
    while waiting:
        for number, stream in list(waiting.items()):
            with contextlib.suppress(TimeoutError):
                stream.next(0.0)
                order.append(number)
                del waiting[number]
    assert order == [0, 3, 2, 1]


def test_the_tokenizer_is_at_hand(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("The river")
    assert ids == [54, 260, 223, 84, 75, 88, 263]
    assert tokenizer("The river") == {"input_ids": ids}
    assert tokenizer.decode(ids) == "The river"
    assert (tokenizer.eos_token_id, tokenizer.vocab_size, len(tokenizer)) == (2, 288, 288)
    rendered = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>assistant\n")
    assert tokenizer.apply_chat_template(CONVERSATION) == tokenizer.encode(
        rendered.removesuffix("<|im_start|>assistant\n")
    )


def test_an_engine_without_a_tokenizer_takes_and_gives_ids(make_engine: MakeEngine) -> None:
    with_text = make_engine().generate([5, 6], greedy(5), use_tqdm=False)[0].outputs[0]
    llm = make_engine(skip_tokenizer_init=True)
    (output,) = llm.generate([5, 6], greedy(5, detokenize=False, logprobs=0), use_tqdm=False)
    assert output.outputs[0].token_ids == with_text.token_ids
    assert output.outputs[0].text == ""
    assert all(entry.decoded_token is None for row in output.outputs[0].logprobs for entry in row.values())
    with pytest.raises(ValidationError, match="skip_tokenizer_init"):
        llm.generate("text", greedy(5), use_tqdm=False)


def test_the_tokenizer_may_come_from_elsewhere(make_engine: MakeEngine) -> None:
    llm = make_engine(tokenizer=str(ORACLE / "qwen3" / "base"))
    assert llm.get_tokenizer().vocab_size == 288


def test_nothing_is_logged_or_printed_unasked(make_engine: MakeEngine, caplog, capsys) -> None:
    caplog.set_level(logging.WARNING)
    llm = make_engine()
    llm.generate([5], greedy(2), use_tqdm=False, lora_request=lora("alpha", 1))
    assert [record.getMessage() for record in caplog.records] == []
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert not logging.getLogger("manylora").handlers


def test_the_start_up_line_is_there_for_who_asks(make_engine: MakeEngine, caplog) -> None:
    caplog.set_level(logging.INFO, logger="manylora")
    make_engine()
    assert any(
        "float32 weights" in record.getMessage() and "KV blocks" in record.getMessage() for record in caplog.records
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_ctrl_c_ends_a_load_at_once(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def update_to(self: object, done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == 3:
            raise error("stop")

    base = str(ORACLE / "llama" / "base")
    with monkeypatch.context() as patch:
        patch.setattr("manylora.engine.loading._LoadBar.update_to", update_to)
        with pytest.raises(error, match="stop"):
            LLM(base, kv_cache_memory_bytes=1 << 22)
    assert len(calls) == 3
    assert all(0 <= done < total for done, total in calls[:2])
    with LLM(base, kv_cache_memory_bytes=1 << 22, use_tqdm_on_load=False) as llm:
        assert llm.generate([5], greedy(2), use_tqdm=False)


def test_samples_have_the_probabilities_of_the_logits(llm: LLM) -> None:
    prompt, allowed, count = [17, 4, 200, 31], [30, 70, 110, 150, 190], 3000
    logits = logits_of(llm, prompt, None)[-1][allowed].astype("f8")
    weights = np.exp((logits - logits.max()) / 1.5)
    expected = count * weights / weights.sum()
    params = SamplingParams(n=count, temperature=1.5, seed=5, max_tokens=1, allowed_token_ids=allowed, detokenize=False)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    seen = np.array([sum(sample.token_ids == [token] for sample in output.outputs) for token in allowed])
    assert seen.sum() == count
    # 18.5 is the 0.999 quantile of the chi-square distribution with four degrees of freedom; the seed is fixed.
    assert ((seen - expected) ** 2 / expected).sum() < 18.5


def test_narrow_sampling_is_greedy(llm: LLM) -> None:
    expected = llm.generate([5, 6], greedy(10), use_tqdm=False)[0].outputs[0].token_ids
    for fields in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, **fields)
        assert llm.generate([5, 6], params, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_arrays_of_token_ids_are_prompts(llm: LLM) -> None:
    expected = llm.generate([5, 6], greedy(4), use_tqdm=False)[0].outputs[0].token_ids
    for prompts in (np.array([5, 6]), [np.array([5, 6])], [(5, 6)], (5, 6), {"prompt_token_ids": np.array([5, 6])}):
        (output,) = llm.generate(prompts, greedy(4), use_tqdm=False)
        assert output.prompt_token_ids == [5, 6]
        assert output.outputs[0].token_ids == expected


def test_threads_may_share_an_engine(llm: LLM) -> None:
    requests = [None, lora("alpha", 1), lora("beta", 2)]

    def run(number: int) -> list[tuple[Any, ...]]:
        request = requests[number % 3]
        return answer(
            llm.generate([5 + number % 4, 6], greedy(10, logprobs=1), use_tqdm=False, lora_request=request)[0]
        )

    expected = {number: run(number) for number in range(12)}
    with ThreadPoolExecutor(8) as pool:
        numbers = [number % 12 for number in range(60)]
        assert list(pool.map(run, numbers)) == [expected[number] for number in numbers]


def test_dropped_engines_take_their_threads_along() -> None:
    def make() -> LLM:
        return LLM(str(ORACLE / "llama" / "base"), kv_cache_memory_bytes=1 << 22, use_tqdm_on_load=False)

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    make().close()
    before = threads()
    for _ in range(5):
        engine = make()
        assert threads() > before
        del engine
        gc.collect()
    assert threads() <= before


def test_chat_content_may_come_in_parts(llm: LLM) -> None:
    parts = [{"type": "text", "text": "How many orders"}, {"type": "text", "text": "were paid?"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], greedy(1), use_tqdm=False)
    assert "How many orders" in output.prompt
    assert "were paid?" in output.prompt
    image = [{"type": "image_url", "image_url": {"url": "http://nowhere"}}]
    with pytest.raises(ManyLoRAError, match="image_url"):
        llm.chat([{"role": "user", "content": image}], greedy(1), use_tqdm=False)


def test_prompt_dictionaries_have_vllms_types(llm: LLM) -> None:
    text: TextPrompt = {"prompt": "The river"}
    tokens: TokensPrompt = {"prompt_token_ids": [54, 260, 223, 84, 75, 88, 263], "cache_salt": "tenant"}
    outputs = llm.generate([TextPrompt(prompt="The river"), text, tokens], greedy(4), use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_closing_an_engine_ends_it_for_good(make_engine: MakeEngine) -> None:
    from manylora.exceptions import EngineStoppedError

    llm = make_engine()
    with llm:
        assert llm.generate([5], greedy(2), use_tqdm=False)
    with pytest.raises(EngineStoppedError):
        llm.generate([5], greedy(2), use_tqdm=False)
    llm.close()


INTERRUPTED = """
import sys, time
from manylora import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", use_tqdm_on_load=False, kv_cache_memory_bytes=1 << 24, max_num_seqs=4)
long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
prompts = [[5 + i] for i in range(64)]
before = llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids
try:
    print("running", flush=True)
    while True:
        llm.generate(prompts, long, use_tqdm=False)
except KeyboardInterrupt as error:
    began = time.monotonic()
    print("interrupted", flush=True)
after = llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids
stats = llm.llm_engine.stats()
print("usable", before == after, stats["running"], stats["waiting"], time.monotonic() - began < 5, flush=True)
while True:
    llm.generate(prompts, long, use_tqdm=False)
"""


def test_ctrl_c_stops_a_run_and_leaves_the_engine_usable() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(ORACLE / "llama" / "base")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout.readline().strip() == "running"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().strip() == "interrupted"
        assert process.stdout.readline().strip() == "usable True 0 0 True"
        # Uncaught: the program ends, with the ordinary traceback.
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode in (1, 130, -signal.SIGINT)
        assert errors.rstrip().endswith("KeyboardInterrupt")
    finally:
        process.kill()
        process.communicate()
