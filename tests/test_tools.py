"""`manylora chat`, `generate` and `eval`: as a user runs them, against what the engine gives by itself."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import ORACLE, MakeEngine, greedy, lora
from manylora import SamplingParams
from serving.conftest import ADAPTERS, Server, server_flags

BASE = str(ORACLE / "llama" / "base")
MANYLORA = str(Path(sys.executable).parent / "manylora")
ENGINE = [
    BASE, "--device", "cpu", "--dtype", "float32", "--max-lora-rank", "64", "--kv-cache-memory-bytes", "32M",
    "--lora-modules", f"alpha={ADAPTERS / 'alpha'}", f"beta={ADAPTERS / 'beta'}",
]  # fmt: skip


def run(*arguments: str, stdin: str = "", status: int = 0) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run([MANYLORA, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == status, ran.stderr
    assert "Traceback" not in ran.stderr
    return ran


def refused(*arguments: str) -> str:
    """Run something wrong; return the one line that says so."""
    line = run(*arguments, status=2).stderr.splitlines()[-1]
    assert line.startswith("manylora")
    return line


def write_rows(path: Path, *rows: Any) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(path: Path) -> dict[Any, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_generate_answers_each_row_with_its_adapter(tmp_path: Path, make_engine: MakeEngine) -> None:
    names = [None, "alpha", "beta"]
    fields = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    prompts = [[5 + number, 40, 99, 7] for number in range(12)]
    rows = [
        {"prompt_token_ids": prompt, **fields, **({"adapter": names[i % 3]} if names[i % 3] else {})}
        for i, prompt in enumerate(prompts)
    ]
    drawn: dict[str, Any] = {"n": 2, "temperature": 0.7, "seed": 3}
    conversation = [{"role": "user", "content": "Hello"}]
    rows += [
        {"id": "text", "prompt": "Hello", "model": "alpha", **fields, **drawn, "logprobs": 0},
        {"id": "chat", "messages": conversation, "adapter": "beta", "lora_scale": 0.5, **fields},
        {"id": "bad", "prompt_token_ids": [100_000], "adapter": "base"},
    ]
    output = tmp_path / "answers.jsonl"
    command = ["generate", *ENGINE, "-i", write_rows(tmp_path / "in.jsonl", *rows), "-o", str(output)]
    assert "1 of 15 rows" in run(*command, status=1).stderr
    found = rows_of(output)
    llm = make_engine(dtype="float32", enable_lora=True, max_lora_rank=64)
    loras = {None: None, "alpha": lora("alpha", 1), "beta": lora("beta", 2)}
    wanted = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], greedy(6), use_tqdm=False,
        lora_request=[loras[names[i % 3]] for i in range(12)],
    )  # fmt: skip
    for number, one in enumerate(wanted):
        assert len(found[number].pop("row")) == 16
        assert found[number] == {
            "id": number, "adapter": names[number % 3] or "base", "text": one.outputs[0].text,
            "finish_reason": "length", "usage": {"prompt_tokens": 4, "completion_tokens": 6},
        }  # fmt: skip
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0, **drawn)
    (text,) = llm.generate("Hello", params, use_tqdm=False, lora_request=loras["alpha"])
    assert found["text"]["texts"] == [sample.text for sample in text.outputs]
    tokens = [one["id"] for one in found["text"]["logprobs"]]
    assert tokens == text.outputs[0].token_ids
    (chat,) = llm.chat(conversation, greedy(6), use_tqdm=False, lora_request=lora("beta", 2, scale=0.5))
    assert found["chat"]["text"] == chat.outputs[0].text
    assert "out of vocabulary" in found["bad"]["error"]


def interrupted(tmp_path: Path, output: Path, count: int) -> tuple[list[str], int] | None:
    """Run with so many rows, and interrupt it while some are answered and some are not; None if it was over before.

    Whether it is in the middle is looked at while it stands still, so that no machine is too fast or too slow for it.
    """
    rows = [{"prompt_token_ids": [5, 40, 7 + i % 200], "max_tokens": 400, "ignore_eos": True} for i in range(count)]
    source = write_rows(tmp_path / "in.jsonl", *rows)
    command = ["generate", *ENGINE, "--max-num-seqs", "2", "-i", source, "-o", str(output)]
    process = subprocess.Popen([MANYLORA, *command], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (output.exists() and output.read_text().count("\n") >= 3):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGSTOP)
        if output.read_text().count("\n") > count - 20:
            return None
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    return command, count


def test_generate_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    tries = iter([150, 600, 2400])
    while (found_middle := interrupted(tmp_path, output, next(tries))) is None:
        output.unlink()
    command, count = found_middle
    kept = output.read_text().splitlines()
    assert 3 <= len(kept) < count
    # A line that was being written, and one that failed.
    failed = {"id": count - 1, "row": "", "adapter": "base", "error": "the machine was tired"}
    kept = [line for line in kept if json.loads(line)["id"] != count - 1]
    output.write_text("".join(line + "\n" for line in [*kept, json.dumps(failed)]) + '{"id": 148, "te')
    assert f"{len(kept)} of {count} rows are answered already" in run(*command).stderr
    found = rows_of(output)
    assert set(found) == set(range(count))
    assert all(row["usage"]["completion_tokens"] == 400 for row in found.values())
    assert output.read_text().splitlines()[: len(kept)] == kept
    # There is nothing left: not even the model is read.
    assert "Loading" not in run(*command).stderr
    # Another file's answers are not gone on with.
    other = write_rows(tmp_path / "other.jsonl", {"id": "else", "prompt": "x"})
    wrong = ["generate", *ENGINE, "-i", other, "-o", str(output)]
    assert "which" in refused(*wrong)
    run(*wrong, "--overwrite", "--max-tokens", "2")
    assert set(rows_of(output)) == {"else"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{]\n", "line 2 is not JSON"),
        ("[1]\n", "line 2 must be a JSON object, got list"),
        ({"adapter": "alpha"}, "line 2: give one of `prompt`, `prompt_token_ids` and `messages`"),
        ({"prompt": "x", "messages": []}, "line 2: give one of"),
        ({"prompt": 7}, "line 2: `prompt` must be text, got 7"),
        ({"prompt_token_ids": ["x"]}, "line 2: token ids must be integers, got 'x'"),
        ({"prompt": "x", "adapter": "gamma"}, "line 2: there is no adapter `gamma`; there are base, alpha, beta"),
        ({"prompt": "x", "adapter": "alpha", "model": "beta"}, "line 2: `adapter` and `model` differ"),
        ({"prompt": "x", "temperature": -1}, "line 2: temperature must be non-negative"),
        ({"prompt": "x", "heat": 1}, "line 2: "),
        ({"id": 0, "prompt": "x"}, "line 2: the id `0` is given twice"),
    ],
)
def test_a_wrong_row_is_told_before_anything_is_run(tmp_path: Path, row: Any, message: str) -> None:
    source = write_rows(tmp_path / "in.jsonl", {"prompt": "good"}, row)
    line = refused("generate", *ENGINE, "-i", source, "-o", str(tmp_path / "out.jsonl"))
    assert message in line
    assert not (tmp_path / "out.jsonl").exists()


def test_wrong_arguments_are_one_line(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", {"text": "x"})
    output = ["-o", str(tmp_path / "out.jsonl")]
    assert "`/no/such.jsonl` cannot be read" in refused("generate", *ENGINE, "-i", "/no/such.jsonl", *output)
    assert "`/no/base` was not found" in refused("eval", "/no/base", "--data", rows)
    assert "/no/adapter" in refused("eval", BASE, "--lora-modules", "a=/no/adapter", "--data", rows)
    assert "max_lora_rank" in refused("eval", BASE, "--max-lora-rank", "0", "--data", rows)
    assert "temperature must be non-negative" in refused("chat", *ENGINE, "--temperature", "-1")
    assert "has no row" in refused("eval", *ENGINE, "--data", write_rows(tmp_path / "empty.jsonl"))
    assert "give MODEL, or a server" in refused("chat")
    assert "`http://127.0.0.1:1` cannot be reached" in refused("chat", "--url", "http://127.0.0.1:1")
    assert "there is no adapter `zeta`; there are base, alpha, beta" in refused("chat", *ENGINE, "--adapter", "zeta")


def test_eval_is_the_mean_of_what_the_engine_says(tmp_path: Path, make_engine: MakeEngine) -> None:
    texts = ["Hello there", "Some longer text, with a comma."]
    rows = [*({"text": text} for text in texts), {"prompt": "Hello", "completion": " world"}]
    data = write_rows(tmp_path / "data.jsonl", *rows)
    result = json.loads(run("eval", *ENGINE, "--data", data, "--json").stdout)
    assert [one["name"] for one in result] == ["base", "alpha", "beta"]
    llm = make_engine(dtype="float32", enable_lora=True, max_lora_rank=64)
    core = llm.llm_engine.core
    counted = [(core.encode(text, True), 1) for text in texts]
    before = core.encode("Hello", True)
    counted.append((before + core.encode(" world", False), len(before)))
    for one, adapter in zip(result, [None, lora("alpha", 1), lora("beta", 2)], strict=True):
        found = []
        for tokens, first in counted:
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False, lora_request=adapter)
            assert output.prompt_logprobs is not None
            for position in range(first, len(tokens)):
                ranked = output.prompt_logprobs[position]
                assert ranked is not None
                found.append(ranked[tokens[position]].logprob)
        assert one["tokens"] == len(found)
        assert one["loss"] == pytest.approx(-math.fsum(found) / len(found), rel=1e-12)
        assert one["perplexity"] == pytest.approx(math.exp(one["loss"]), rel=1e-12)
    assert len({one["perplexity"] for one in result}) == 3
    lines = run("eval", *ENGINE, "--data", data).stdout.splitlines()
    assert lines[0].split() == ["adapter", "perplexity", "of", "the", "base", "loss", "tokens"]
    assert [line.split()[0] for line in lines[1:]] == ["base", "alpha", "beta"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "give one of `text`, `prompt` with `completion`, and `messages`"),
        ({"text": ""}, "has no token that counts"),
        ({"messages": [{"role": "user", "content": "x"}]}, "the last of `messages` must be the assistant's"),
        ({"text": "word " * 2000}, "511 is the most"),
    ],
)
def test_eval_names_the_row_that_is_wrong(tmp_path: Path, row: Any, message: str) -> None:
    line = refused("eval", *ENGINE, "--data", write_rows(tmp_path / "data.jsonl", row))
    assert "line 1" in line
    assert message in line


def test_chat_reads_turns_from_a_pipe(make_engine: MakeEngine) -> None:
    turns = ["Hello", "/adapter alpha", "Hello again", "/reset", "/adapter", "/set temperature=x", "/nothing", "Hello"]
    talk = ["--max-tokens", "5", "--temperature", "0", "--system", "Be kind."]
    ran = run("chat", *ENGINE, *talk, stdin="\n".join(turns) + "\n", status=1)
    llm = make_engine(dtype="float32", enable_lora=True, max_lora_rank=64)
    params = SamplingParams(max_tokens=5, temperature=0)
    said: list[str] = []
    history: list[dict[str, str]] = [{"role": "system", "content": "Be kind."}]
    for text, adapter in [("Hello", None), ("Hello again", lora("alpha", 1)), ("Hello", lora("alpha", 1))]:
        if len(said) == 2:
            history = history[:1]
        history.append({"role": "user", "content": text})
        (output,) = llm.chat(history, params, use_tqdm=False, lora_request=adapter)
        said.append(output.outputs[0].text)
        history.append({"role": "assistant", "content": said[-1]})
    assert ran.stdout == "".join(text + "\n" for text in said if text)
    assert "base\nalpha\nbeta\n" in ran.stderr
    assert "/set takes NAME=NUMBER" in ran.stderr
    assert "there is no command /nothing" in ran.stderr


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    modules = ["--lora-modules", f"alpha={ADAPTERS / 'alpha'}", "--api-key", "secret"]
    server = Server(server_flags(*modules), ADAPTERS, {})
    yield server
    server.close()


def test_chat_talks_to_a_server(server: Server) -> None:
    talk = ["chat", "--url", server.url, "--max-tokens", "5", "--temperature", "0", "--adapter", "alpha"]
    assert "401" in refused(*talk)
    ran = run(*talk, "--api-key", "secret", stdin="Hello\n/adapter base\nHello\n")
    key = {"Authorization": "Bearer secret"}
    messages: list[dict[str, str]] = []
    for model, said in zip(["alpha", "base"], ran.stdout.split("\n"), strict=False):
        messages.append({"role": "user", "content": "Hello"})
        body = {"model": model, "messages": messages, "max_tokens": 5, "temperature": 0}
        text = server.post("/v1/chat/completions", body, **key).json()["choices"][0]["message"]["content"]
        assert said == text
        messages.append({"role": "assistant", "content": text})
    assert "`beta`" in refused(*talk[:-1], "beta", "--api-key", "secret")


def test_ctrl_c_stops_an_answer_and_not_the_conversation() -> None:
    """In a terminal: an answer that would take long ends, and the next turn is answered."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [MANYLORA, "chat", *ENGINE, "--max-tokens", "480", "--temperature", "0"],
        stdin=child, stdout=child, stderr=child,
        start_new_session=True, preexec_fn=lambda: os.close(parent), env=os.environ | {"TERM": "dumb"},
    )  # fmt: skip
    os.close(child)
    # Nobody reads any more once it has ended: a write would wait for ever.
    os.set_blocking(parent, False)
    shown = b""

    def read_some() -> None:
        nonlocal shown
        if select.select([parent], [], [], 0.1)[0]:
            shown += os.read(parent, 4096)

    def read_until(pattern: bytes, after: int = 0) -> int:
        deadline = time.monotonic() + 60
        while not (found := re.search(pattern, shown[after:])):
            assert time.monotonic() < deadline, shown
            read_some()
        return after + found.end()

    def meet(number: int, after: int) -> int:
        """Say something that is answered at once, until it is: a signal may have taken a line away."""
        deadline = time.monotonic() + 60
        while not (found := re.search(rb"no command /here%d;.*?alpha> " % number, shown[after:], re.DOTALL)):
            assert time.monotonic() < deadline, shown
            os.write(parent, b"/here%d\n" % number)
            until = time.monotonic() + 2
            while time.monotonic() < until and b"no command /here%d;" % number not in shown[after:]:
                read_some()
            read_some()
        return after + found.end()

    try:
        at = read_until(rb"base> ")
        os.write(parent, b"/adapter alpha\n")
        at = read_until(rb"alpha> ", at)
        # The answer may be over before the signal is there: until one was stopped.
        for attempt in range(50):
            os.write(parent, b"Hello\n")
            begun = read_until(rb"Hello\r\n.", at)
            process.send_signal(signal.SIGINT)
            at = meet(attempt, begun)
            if b" [stopped]" in shown[begun:at]:
                break
        else:
            pytest.fail(f"no answer was stopped: {shown!r}")
        # The conversation goes on: the next turn is answered to its end.
        os.write(parent, b"/set max_tokens=3\n")
        at = meet(50, at)
        os.write(parent, b"Hello again\n")
        begun = read_until(rb"Hello again\r\n.", at)
        at = read_until(rb"alpha> ", begun)
        assert b"[stopped]" not in shown[begun:at]
        # What it says at its end is read, too: nobody can end who cannot write.
        os.write(parent, b"/quit\n")
        deadline = time.monotonic() + 60
        while process.poll() is None:
            assert time.monotonic() < deadline, shown
            with contextlib.suppress(OSError):
                read_some()
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)
