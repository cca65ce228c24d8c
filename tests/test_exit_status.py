"""Whatever is wrong with what a command is given is one line and status 2; every help has examples that are right."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import ORACLE
from manylora import _core
from manylora.cli import build_parser, main
from manylora.exceptions import (
    AdapterError,
    EngineStoppedError,
    FetchError,
    HubError,
    ManyLoRAError,
    ModelError,
    RequestError,
    ValidationError,
)
from serving.conftest import read_as_others_do

BASE = str(ORACLE / "llama" / "base")
ADAPTER = str(ORACLE / "llama" / "adapters" / "alpha")
DORA = str(ORACLE / "llama" / "adapters" / "dora")
NONE = "/no/such/place"
THERE = {"base": BASE, "adapter": ADAPTER, "dora": DORA, "none": NONE}
CPU = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "4M")


def parsers() -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every parser of the command line, by its words."""

    def below(
        path: tuple[str, ...], parser: argparse.ArgumentParser
    ) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
        yield path, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, one in action.choices.items():
                    yield from below((*path, name), one)

    yield from below((), build_parser())


PARSERS = dict(parsers())


@dataclass(frozen=True)
class Files:
    """Things that are not what they should be."""

    folder: str
    empty: str
    binary: str
    no_json: str
    no_yaml: str
    deep: str
    number: str
    rows: str
    port: str
    calibration: str


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    root = tmp_path_factory.mktemp("wrong")

    def file(name: str, content: bytes) -> str:
        (root / name).write_bytes(content)
        return str(root / name)

    (root / "folder").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield Files(
            folder=str(root / "folder"),
            empty=file("empty", b""),
            binary=file("binary", bytes(range(256)) * 40),
            no_json=file("no.json", b'{"a": [1, 2'),
            no_yaml=file("no.yaml", b"a: [1, 2\nb: }"),
            deep=file("deep.json", b"[" * 2000),
            number=file("number.json", b"7\n"),
            rows=file("rows.jsonl", b'{"prompt": "x"}\n'),
            port=str(taken.getsockname()[1]),
            calibration=file("calibration.json", b'{"format": "something else"}'),
        )


# Arguments by command; `{name}` is one of the files. Of those behind `LATE` it is found out once the base is loaded.
LATE = "late"
WRONG: dict[str, list[str]] = {
    "": [
        "nothing", "--no-such-flag",
    ],
    "demo": [
        "--model {none}", "--model {folder}", "--model {binary}", "--max-tokens 0", "--max-tokens -1",
        "--max-tokens x", "--dtype int8", "--device tpu", "--threads -2", "--model {base} --into {empty}", "surplus",
    ],
    "serve": [
        "", "{none}", "{folder}", "{empty}", "{binary}", "{base} {base}", "{base} --config {none}",
        "{base} --config {folder}", "{base} --config {binary}", "{base} --config {no_yaml}",
        "{base} --config {number}", "{base} --config {deep}", "{base} --keys-file {none}",
        "{base} --keys-file {folder}", "{base} --keys-file {binary}", "{base} --keys-file {no_yaml}",
        "{base} --keys-file {number}", "{base} --keys-file {deep}", "{base} --lora-manifest {none}",
        "{base} --lora-manifest {folder}", "{base} --lora-manifest {binary}", "{base} --lora-manifest {no_json}",
        "{base} --lora-manifest {deep}", "{base} --lora-manifest {number}", "{base} --lora-modules a",
        "{base} --lora-modules a=x a=y", "{base} --port -1", "{base} --port 65536", "{base} --port {port}",
        "{base} --host 256.1.1.1", "{base} --max-num-seqs -4", "{base} --max-lora-rank -1",
        "{base} --ssl-certfile {none} --ssl-keyfile {none} --port 0", "{base} --tensor-parallel-size 2",
        "{base} --chat-template {binary} --port 0", "{base} --dtype int8", "{base} --tokenizer {none} --port 0",
        "{base} --record-trace {folder} --port 0 --device cpu", LATE, "{base} --port 0 --lora-modules a={none}",
        "{base} --port 0 --lora-modules a={folder}", "{base} --port 0 --lora-modules a={base}",
        "{base} --port 0 --lora-modules a={dora} b={none}",
        "{base} --port 0 --lora-modules base={adapter} --served-model-name base",
    ],
    "chat": [
        "", "{base} --url http://127.0.0.1:1", "--url ftp://x", "--url http://127.0.0.1:1", "{none}", "{folder}",
        "{base} --max-tokens -1", "{base} --max-tokens x", "{base} --temperature -1", "{binary}", LATE,
        "{base} --adapter nobody", "{base} --lora-modules a={none}",
    ],
    "generate": [
        "{base}", "{base} -i {none} -o {out}/out", "{base} -i {folder} -o {out}/out",
        "{base} -i {binary} -o {out}/out", "{base} -i {no_json} -o {out}/out",
        "{base} -i {deep} -o {out}/out", "{base} -i {number} -o {out}/out", "{base} -i {rows} -o {folder}",
        "{base} -i {rows} -o {none}/out", "{base} -i {rows} -o {rows}",
        "{base} -i {rows} -o {out}/out --max-tokens -1", "{base} -i {rows} -o {out}/out --max-tokens x",
        "{base} -i {rows} -o {out}/out --temperature -1", "{none} -i {rows} -o {out}/out",
        "{folder} -i {rows} -o {out}/out", "{binary} -i {rows} -o {out}/out", LATE,
        "{base} -i {rows} -o {out}/out --lora-modules a={folder}",
    ],
    "eval": [
        "{base}", "{base} --data {none}", "{base} --data {folder}", "{base} --data {binary}", "{base} --data {empty}",
        "{base} --data {no_json}", "{base} --data {deep}", "{none} --data {rows}", "{folder} --data {rows}",
        "{base} --data {rows} --max-lora-rank 0", "{base} --data {rows} --max-num-seqs -1", LATE,
        "{base} --data {rows}", "{base} --data {rows} --lora-modules a={dora}",
    ],
    "inspect": [
        "", "{adapter}", "{none} --base {base}", "{empty} --base {base}", "{folder} --base {base}",
        "{base} --base {base}", "{adapter} --base {none}", "{adapter} --base {folder}", "{adapter} --base {binary}",
        "{adapter} --base {adapter}", "{adapter} --base {base} --max-lora-rank 0",
        "{adapter} --base {base} --max-lora-rank 513", "{adapter} --base {base} --max-lora-rank -1",
        "{adapter} --base {base} --max-lora-rank x", "{adapter} --base {base} --dtype int8",
        "{adapter} surplus --base {base}",
    ],
    "merge": [
        "", "{base}", "{base} {adapter}", "{none} {adapter} {out}/out", "{folder} {adapter} {out}/out",
        "{binary} {adapter} {out}/out", "{base} {none} {out}/out", "{base} {folder} {out}/out",
        "{base} {base} {out}/out", "{base} {dora} {out}/out", "{base} {empty} {out}/out",
        "{base} {adapter} {empty}", "{base} {adapter} {empty} --overwrite", "{base} {adapter} {base} --overwrite",
        "{base} {adapter} {base}/inside", "{base} {adapter} {adapter} --overwrite", "{base} {adapter} {none}/out",
        "{base} {adapter} /", "{base} {adapter} {out}/out --weights 1,2",
        "{base} {adapter} {out}/out --weights x", "{base} {adapter} {out}/out --weights nan",
        "{base} {adapter} {out}/out --weights 1e39", "{base} {adapter} {out}/out --dtype int8",
        "{base} {adapter} {out}/out --max-shard-size 0", "{base} {adapter} {out}/out --max-shard-size -1",
        "{base} {adapter} {out}/out --max-shard-size much",
        "{base} {adapter} {out}/out --weights 1e30 --dtype float16",
    ],
    "bench": [
        "", "nothing",
    ],
    "bench serve": [
        "--base-url nowhere", "--base-url http://127.0.0.1:1", "--port -1", "--num-prompts 0", "--num-prompts -1",
        "--num-warmups -1", "--request-rate -1", "--input-len x", "--output {none}/x", "--output {folder}",
        "--report {none}.html", "--report {folder}/x.txt", "--base-url http://127.0.0.1:1 --dataset-path {binary}",
        "--max-concurrency 0",
    ],
    "plan": [
        "", "--model Qwen2.5-7B-Instruct", "--gpu rtx4090 --model nobody", "--gpu abacus --model Qwen2.5-7B-Instruct",
        "--gpu cpu --model {binary}", "--gpu cpu --model {no_json}", "--gpu cpu --model {folder}",
        "--gpu rtx4090 --model Qwen2.5-7B-Instruct --adapters -1",
        "--gpu rtx4090 --model Qwen2.5-7B-Instruct --rank 0", "--gpu rtx4090 --model Qwen2.5-7B-Instruct --rank x",
        "--gpu rtx4090 --model Qwen2.5-7B-Instruct --plot x.txt",
        "--gpu rtx4090 --model Qwen2.5-7B-Instruct --plot {none}/x.svg", "--gpu rtx4090 --model Llama-2-70b",
        "--gpu rtx4090 --model Qwen2.5-7B-Instruct --max-num-seqs 0",
    ],
    "sim": [
        "", "--config {none}", "--config {folder}", "--config {binary}", "--config {no_yaml}", "--config {number}",
        "--config {deep}", "--model nobody --gpu a100-80", "--model Llama-2-7b --gpu abacus",
        "--model Llama-2-7b --gpu a100-80 --trace {none}", "--model Llama-2-7b --gpu a100-80 --trace {binary}",
        "--model Llama-2-7b --gpu a100-80 --rate -1", "--model Llama-2-7b --gpu a100-80 --set nothing=1",
        "--model Llama-2-7b --gpu a100-80 --set x", "--model Llama-2-7b --gpu a100-80 --plot x.txt",
        "--model Llama-2-7b --gpu a100-80 --plot {none}/x.svg", "--model Llama-2-7b --gpu cpu --calibration {none}",
        "--model Llama-2-7b --gpu cpu --calibration {calibration}",
    ],
    "sim calibrate": [
        "", "{none} -o {out}/c", "{folder} -o {out}/c", "{binary} -o {out}/c", "{empty} -o {out}/c",
        "{no_json} -o {out}/c", "{rows}",
    ],
    "sim replay": [
        "", "{none}", "{folder}", "{binary}", "{empty}", "{no_json}", "{rows} --calibration {none}",
        "{rows} --calibration {binary}", "{rows} --calibration {no_json}",
    ],
    "doctor": [
        "surplus", "--json=1",
    ],
    "completions": [
        "", "tcsh", "bash surplus",
    ],
}  # fmt: skip


def wrong() -> Iterator[tuple[str, str, bool]]:
    for command, lines in WRONG.items():
        is_late = False
        for line in [*lines, "--no-such-flag"]:
            if line == LATE:
                is_late = True
            else:
                yield command, line, is_late and line != "--no-such-flag"


def test_every_command_is_walked() -> None:
    assert set(WRONG) == {" ".join(path) for path in PARSERS}


@pytest.mark.parametrize(("command", "line", "is_late"), list(wrong()))
def test_wrong_inputs_are_one_line_and_status_2(
    command: str,
    line: str,
    is_late: bool,
    files: Files,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process: an exception that gets out, which would be a traceback, fails the test by itself."""
    monkeypatch.delenv("MANYLORA_SMOLLM2", raising=False)
    # What `serve` changes of the process.
    monkeypatch.setattr(_core, "set_log", lambda level, json_lines: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    arguments = [*command.split(), *shlex.split(line.format(**vars(files), **THERE, out=tmp_path))]
    if is_late:
        arguments += CPU
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    printed, told = capfd.readouterr()
    assert status == 2, told
    assert printed == ""
    errors = [one for one in told.splitlines() if re.match(r"manylora[\w ]*: error: ", one)]
    assert len(errors) == 1, told
    last = told.splitlines()[-1]
    assert last == errors[0]
    assert "Traceback" not in told
    assert "usage:" not in told
    if not is_late:
        assert told.splitlines() == errors
    assert os.listdir(files.folder) == []
    # `generate` finds out that it can write before it does anything else.
    assert command == "generate" or os.listdir(tmp_path) == []


def test_as_a_user_sees_it(files: Files, tmp_path: Path) -> None:
    """The same from outside, with files that may not be read and a hub that cannot be reached."""
    secret = tmp_path / "secret"
    shutil.copytree(ADAPTER, secret / "adapter")
    shutil.copytree(BASE, secret / "base")
    for file in (
        secret / "adapter/adapter_config.json",
        secret / "base/model.safetensors",
        secret / "base/config.json",
    ):
        file.chmod(0)
    unread = tmp_path / "rows.jsonl"
    unread.write_text('{"prompt": "x"}\n')
    unread.chmod(0)
    for line in (
        f"inspect {secret}/adapter --base {BASE}",
        f"inspect {ADAPTER} --base {secret}/base",
        f"merge {secret}/base {ADAPTER} {tmp_path}/out",
        f"eval {BASE} --data {unread}",
        f"generate {BASE} --input {unread} --output {tmp_path}/out",
        f"serve {secret}/base --port 0",
        f"serve {BASE} --config {unread}",
        f"sim --config {unread}",
        f"sim replay {unread}",
        f"inspect nobody/nothing --base {BASE}",
        f"inspect {ADAPTER} --base nobody/nothing",
    ):
        ran = subprocess.run(
            [sys.executable, "-m", "manylora", *line.split()],
            preexec_fn=read_as_others_do, capture_output=True, text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}, timeout=60, check=False,
        )  # fmt: skip
        assert (ran.returncode, ran.stdout) == (2, ""), f"{line}: {ran.stderr}"
        (told,) = ran.stderr.splitlines()
        assert re.match(r"manylora( serve)?: error: ", told), line


def test_what_exceptions_say_of_the_status() -> None:
    assert {error.exit_status for error in (ValidationError(""), ModelError(""), HubError(""))} == {2}
    assert {
        error.exit_status for error in (ManyLoRAError(""), RequestError(""), EngineStoppedError(""), FetchError(""))
    } == {1}
    by_kind = {
        kind: AdapterError("a", [], "", kind=kind).exit_status
        for kind in ("invalid", "forbidden", "unavailable", "timeout")
    }
    assert by_kind == {"invalid": 2, "forbidden": 2, "unavailable": 1, "timeout": 1}


def examples(parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    """The command lines of a help's examples, as words."""
    _, _, text = (parser.epilog or "").partition("examples:\n")
    for line in text.partition("\n\n")[0].replace("\\\n", " ").splitlines():
        # What follows after some room is said about it; a pipe leads to it, and its output may go to a file.
        command = re.split(r"(?<=\S) {2,}(?=[^ -])", line.strip())[0]
        found = re.search(r"(?:^|\| )(manylora .*?)(?: > \S+)?$", command)
        if found:
            yield shlex.split(found[1])[1:]


@pytest.mark.parametrize("path", list(PARSERS), ids=lambda path: " ".join(path) or "manylora")
def test_every_help_has_examples_that_are_right(path: tuple[str, ...]) -> None:
    found = list(examples(PARSERS[path]))
    assert found, "no examples"
    for words in found:
        assert tuple(words[: len(path)]) == path
        parsed = build_parser().parse_args(words)
        assert callable(parsed.run), words
