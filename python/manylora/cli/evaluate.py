"""`manylora eval`: perplexity of the base and of each adapter on a file of texts, in one mixed run."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from manylora.async_llm import AsyncLLM
from manylora.cli.local import BASE, add_engine_flags, asked
from manylora.cli.rows import read_rows, take
from manylora.exceptions import ManyLoRAError, ValidationError
from manylora.lora.request import LoRARequest
from manylora.outputs import Logprob
from manylora.prompts import as_json
from manylora.sampling_params import SamplingParams

EXAMPLES = """\
a row of the data, as JSON in one line:
  {"text": "..."}                                     every token but the first counts
  {"prompt": "...", "completion": "..."}              those of the completion count
  {"messages": [..., {"role": "assistant", ...}]}     those of the last message count

Perplexity is exp of the mean, over all counted tokens of all rows, of -ln of the probability that each had after those
before it. It is comparable between adapters of one base and on the same data only.

examples:
  manylora eval BASE --lora-modules sql=./sql support=./support --data held-out.jsonl
  manylora eval BASE --lora-modules sql=./sql --data held-out.jsonl --json > result.json
"""


@dataclass
class Text:
    """A row: its tokens, and the first of those that count."""

    token_ids: list[int]
    first: int
    where: str


@dataclass
class Score:
    """What came of one adapter, or of the base."""

    name: str
    logprobs: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def loss(self) -> float:
        """Mean of -ln(probability) of a token."""
        # Summed exactly: the order in which rows end must not matter.
        return -math.fsum(self.logprobs) / self.tokens

    @property
    def perplexity(self) -> float:
        """Its exponential; infinite where that is beyond all numbers."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "eval",
        help="perplexity of the base and each adapter on a file of texts",
        description="Compute the perplexity of the base and of each adapter on texts, all in one mixed batch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", required=True, metavar="FILE", help="texts, as rows of JSON")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a row for the base and for each adapter."""
    engine = asked(arguments)
    rows = list(read_rows(arguments.data))
    if not rows:
        raise ValidationError(f"`{arguments.data}` has no row")
    with AsyncLLM.from_engine_args(engine.settings) as llm:
        engine.register(llm.llm_engine)
        texts = [_text(llm, row, where) for where, row in rows]
        longest = llm.llm_engine.core.info().max_model_len - 1
        for text in texts:
            if len(text.token_ids) > longest:
                raise ValidationError(
                    f"{text.where} has {len(text.token_ids)} tokens, {longest} is the most (max_model_len - 1): cut it"
                )
        loras: dict[str, LoRARequest | None] = {BASE: None, **engine.adapters}
        scores = asyncio.run(_score(llm, texts, loras, engine.at_once))
    if arguments.json:
        result = [
            {"name": score.name, "perplexity": score.perplexity, "loss": score.loss, "tokens": score.tokens}
            for score in scores
        ]
        print(json.dumps(result))
    else:
        print("\n".join(_table(scores)))
    return 0


def _text(llm: AsyncLLM, row: dict[str, Any], where: str) -> Text:
    core = llm.llm_engine.core
    text, prompt, completion = (take(row, key, str, where) for key in ("text", "prompt", "completion"))
    messages = take(row, "messages", list, where)
    given = [text is not None, prompt is not None and completion is not None, messages is not None]
    if given.count(True) != 1 or (prompt is None) != (completion is None):
        raise ValidationError(f"{where}: give one of `text`, `prompt` with `completion`, and `messages`")
    special = messages is None
    if messages is not None:
        if not messages or not isinstance(messages[-1], dict) or messages[-1].get("role") != "assistant":
            raise ValidationError(f"{where}: the last of `messages` must be the assistant's")
        try:
            prompt = core.render_chat(as_json("messages", messages[:-1]))
            whole = core.render_chat(as_json("messages", messages), add_generation_prompt=False)
        except ManyLoRAError as error:
            raise ValidationError(f"{where}: {error}") from error
        if not whole.startswith(prompt):
            raise ValidationError(f"{where}: the chat template does not write the last message behind the others")
        completion = whole[len(prompt) :]
    if text is not None:
        token_ids, first = core.encode(text, special), 1
    else:
        # Apart, as they would be while the model writes: where the two meet, no token has characters of both.
        before = core.encode(prompt or "", special)
        token_ids, first = before + core.encode(completion or "", False), max(len(before), 1)
    if len(token_ids) <= first:
        raise ValidationError(f"{where} has no token that counts: the first token of all has nothing before it")
    return Text(token_ids, first, where)


async def _score(llm: AsyncLLM, texts: list[Text], loras: dict[str, LoRARequest | None], at_once: int) -> list[Score]:
    """Run each text with each adapter, the adapters of a text side by side."""
    scores = {name: Score(name) for name in loras}
    pairs = iter([(text, name) for text in texts for name in loras])
    count = len(texts) * len(loras)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with tqdm(total=count, desc="Texts", dynamic_ncols=True, unit="text") as bar:

        async def work() -> None:
            for text, name in pairs:
                prompt = {"prompt_token_ids": text.token_ids}
                request = f"{text.where} with {name}"
                async for output in llm.generate(prompt, params, request, lora_request=loras[name]):
                    if output.finished and output.prompt_logprobs is not None:
                        found = list(_counted(text, output.prompt_logprobs))
                        scores[name].logprobs.append(math.fsum(found))
                        scores[name].tokens += len(found)
                bar.update(1)

        workers = [asyncio.create_task(work()) for _ in range(min(count, at_once))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
    return list(scores.values())


def _counted(text: Text, logprobs: list[dict[int, Logprob] | None]) -> Iterator[float]:
    for position in range(text.first, len(text.token_ids)):
        ranked = logprobs[position]
        assert ranked is not None
        yield ranked[text.token_ids[position]].logprob


def _table(scores: list[Score]) -> Iterator[str]:
    width = max(len("adapter"), *(len(score.name) for score in scores))
    base = scores[0].perplexity
    yield f"{'adapter':{width}}  {'perplexity':>12}  {'of the base':>11}  {'loss':>8}  {'tokens':>8}"
    for score in scores:
        ratio = score.perplexity / base if base and math.isfinite(base) else math.nan
        yield f"{score.name:{width}}  {score.perplexity:12.4f}  {ratio:11.3f}  {score.loss:8.4f}  {score.tokens:8}"
