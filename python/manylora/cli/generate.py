"""`manylora generate`: a file of prompts in, a file of answers out, each row with an adapter of its own."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from manylora.async_llm import AsyncLLM
from manylora.cli.local import BASE, Asked, add_engine_flags, asked
from manylora.cli.rows import RowFile, read_rows, take
from manylora.exceptions import AdapterError, RequestError, ValidationError
from manylora.lora.request import LoRARequest
from manylora.outputs import RequestOutput
from manylora.prompts import as_json, parse
from manylora.sampling_params import RequestOutputKind, SamplingParams

EXAMPLES = """\
a row of the input, as JSON in one line:
  {"prompt": "List all customers.", "adapter": "sql", "max_tokens": 64}
  {"id": "q7", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
prompt, prompt_token_ids or messages; adapter (or model), lora_scale, priority; id, where the number of the row will not
do; all else is a field of SamplingParams. Answers come in the order in which they are finished, each with its row's id.

A run that was interrupted is gone on with by the same command: rows that have an answer are passed over, those that
failed are tried again. `row` of an answer is a digest of what was asked: answers to other rows are never passed over.

examples:
  manylora generate BASE --lora-modules sql=./sql support=./support --input prompts.jsonl --output answers.jsonl
"""


@dataclass
class Job:
    """A row to answer."""

    id: str | int
    prompt: Any
    messages: list[Any] | None
    params: SamplingParams
    adapter: str
    lora: LoRARequest | None
    priority: int
    where: str
    digest: str


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "generate",
        help="answer a file of prompts, each with its adapter",
        description="Answer a file of prompts (JSON lines) in one continuous batch, each with an adapter of its own.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", "-i", required=True, metavar="FILE", help="rows to answer")
    parser.add_argument("--output", "-o", required=True, metavar="FILE", help="answers; what is there is gone on with")
    parser.add_argument("--overwrite", action="store_true", help="begin anew, whatever the output has")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of answers whose row does not say")
    parser.add_argument("--temperature", type=float, metavar="T", help="temperature of rows that do not say")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer the rows; the status is 1 if some could not be answered."""
    engine = asked(arguments)
    _check_apart(arguments.input, arguments.output)
    defaults = {name: getattr(arguments, name) for name in ("max_tokens", "temperature")}
    defaults = {name: value for name, value in defaults.items() if value is not None}
    jobs = list(read_jobs(arguments.input, engine, defaults))
    output = RowFile(arguments.output, "id", _is_answer, overwrite=arguments.overwrite)
    try:
        answered = _answered(arguments, jobs, output.rows)
        if any("error" in row for row in output.rows):
            output.replace([row for row in output.rows if "error" not in row])
        left = [job for job in jobs if job.id not in answered]
        if answered:
            print(f"{len(answered)} of {len(jobs)} rows are answered already", file=sys.stderr)
        if not left:
            output.begin()
            return 0
        with AsyncLLM.from_engine_args(engine.settings) as llm:
            engine.register(llm.llm_engine)
            output.begin()
            failed = asyncio.run(_answer(llm, left, output, engine.at_once))
    finally:
        output.close()
    if failed:
        print(f"manylora: {failed} of {len(jobs)} rows could not be answered: `error` says why", file=sys.stderr)
    return 1 if failed else 0


def _check_apart(source: str, output: str) -> None:
    """Refuse to write over what is read."""
    try:
        is_same = Path(source).expanduser().samefile(Path(output).expanduser())
    except OSError:
        return
    if is_same:
        raise ValidationError(f"--output `{output}` is the input: give another file")


def _is_answer(row: dict[str, Any]) -> bool:
    return (
        isinstance(row.get("id"), (str, int)) and isinstance(row.get("row"), str) and ("text" in row or "error" in row)
    )


def _answered(arguments: argparse.Namespace, jobs: list[Job], rows: list[dict[str, Any]]) -> set[str | int]:
    """Return the ids that have an answer.

    Raises:
        ValidationError: there is an answer to something else than what is asked now.

    """
    digests = {job.id: job.digest for job in jobs}
    answered = set()
    for row in rows:
        if "error" in row:
            continue
        name = row["id"]
        if digests.get(name) != row["row"]:
            what = "is another row now" if name in digests else "is not there"
            raise ValidationError(
                f"`{arguments.output}` has an answer to `{name}`, which {what} in `{arguments.input}` (or with these "
                "flags): give another file, or --overwrite"
            )
        answered.add(name)
    return answered


def read_jobs(path: str, engine: Asked, defaults: dict[str, Any]) -> Iterator[Job]:
    """Yield the rows of a file.

    Raises:
        ValidationError: a row is wrong; the message says where and what.

    """
    seen = set()
    for number, (where, row) in enumerate(read_rows(path)):
        name = take(row, "id", (str, int), where)
        name = number if name is None else name
        if name in seen:
            raise ValidationError(f"{where}: the id `{name}` is given twice")
        seen.add(name)
        yield _job(name, row, where, engine, defaults)


def _job(name: str | int, row: dict[str, Any], where: str, engine: Asked, defaults: dict[str, Any]) -> Job:
    digest = hashlib.sha256(json.dumps(defaults | row, sort_keys=True).encode()).hexdigest()[:16]
    text = take(row, "prompt", str, where)
    token_ids, messages = (take(row, key, list, where) for key in ("prompt_token_ids", "messages"))
    if [text, token_ids, messages].count(None) != 2:
        raise ValidationError(f"{where}: give one of `prompt`, `prompt_token_ids` and `messages`")
    adapter, model = (take(row, key, str, where) for key in ("adapter", "model"))
    if adapter is not None and model not in (None, adapter):
        raise ValidationError(f"{where}: `adapter` and `model` differ; both name the adapter")
    chosen = engine.chosen(adapter or model, where)
    scale = take(row, "lora_scale", (int, float), where)
    priority = take(row, "priority", int, where) or 0
    try:
        if text is not None or token_ids is not None:
            parse({"prompt": text} if token_ids is None else {"prompt_token_ids": token_ids})
        params = SamplingParams(**(defaults | row), output_kind=RequestOutputKind.FINAL_ONLY)
        if chosen is not None and scale is not None:
            chosen = LoRARequest(chosen.lora_name, chosen.lora_int_id, chosen.lora_path, scale=scale)
    except (ValidationError, TypeError) as error:
        raise ValidationError(f"{where}: {error}") from error
    prompt = text if token_ids is None else {"prompt_token_ids": token_ids}
    return Job(name, prompt, messages, params, adapter or model or BASE, chosen, priority, where, digest)


async def _answer(llm: AsyncLLM, jobs: list[Job], output: RowFile, at_once: int) -> int:
    """Answer rows; return how many failed."""
    failed = tokens = 0
    begun = time.monotonic()
    waiting = iter(jobs)
    bar = tqdm(total=len(jobs), desc="Rows", dynamic_ncols=True, unit="row")

    async def work() -> None:
        nonlocal failed, tokens
        for job in waiting:
            row: dict[str, Any] = {"id": job.id, "row": job.digest, "adapter": job.adapter}
            try:
                answer = await _one(llm, job)
            except (ValidationError, AdapterError, RequestError) as error:
                failed += 1
                row["error"] = str(error)
            else:
                row |= _row(answer)
                tokens += row["usage"]["completion_tokens"]
            output.write(row)
            bar.set_postfix_str(f"{tokens / max(time.monotonic() - begun, 1e-9):.0f} tokens/s", refresh=False)
            bar.update(1)

    with bar:
        workers = [asyncio.create_task(work()) for _ in range(min(len(jobs), at_once))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
    return failed


async def _one(llm: AsyncLLM, job: Job) -> RequestOutput:
    prompt, special = job.prompt, True
    if job.messages is not None:
        prompt, special = llm.llm_engine.core.render_chat(as_json("messages", job.messages)), False
    outputs = llm.generate(
        prompt, job.params, job.where, lora_request=job.lora, priority=job.priority,
        tokenization_kwargs={"add_special_tokens": special},
    )  # fmt: skip
    last = None
    async for output in outputs:
        last = output
    assert last is not None
    return last


def _row(answer: RequestOutput) -> dict[str, Any]:
    samples = answer.outputs
    row: dict[str, Any] = {"text": samples[0].text, "finish_reason": samples[0].finish_reason}
    if len(samples) > 1:
        row["texts"] = [sample.text for sample in samples]
        row["finish_reasons"] = [sample.finish_reason for sample in samples]
    if samples[0].logprobs is not None:
        pairs = zip(samples[0].token_ids, samples[0].logprobs, strict=True)
        chosen = [(token, ranked[token]) for token, ranked in pairs]
        row["logprobs"] = [{"id": token, "token": one.decoded_token, "logprob": one.logprob} for token, one in chosen]
    row["usage"] = {
        "prompt_tokens": len(answer.prompt_token_ids),
        "completion_tokens": sum(len(sample.token_ids) for sample in samples),
    }
    return row
