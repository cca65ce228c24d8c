"""Running what documentation shows: the blocks of a page, in their order, in one folder.

A block of `sh` is run by bash, one of `python` by this interpreter; one under a line that ends with a file's name
(`` `FILE`: ``) is written there instead. A block of `text` is what the block before it printed: each of its lines must
be found there, in this order, `...` standing for anything. A comment before a block says why it is not run:
`<!-- not run: docker -->`. What a block starts in the background lives until the page ends. Pages
write `8765` for the port of a server; a free one stands in its place when they are run.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

RUN = ("sh", "python")
DATA = ("json", "jsonl", "yaml")
PATIENCE = 240
PORT = "8765"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Block:
    """A fenced block: its language, its lines, and what the lines before it say of it."""

    language: str
    text: str
    line: int
    file: str | None
    not_run: str | None


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page."""
    found = []
    lines = page.splitlines()
    number = 0
    before: list[str] = []
    while number < len(lines):
        if match := re.fullmatch(r"```(\w*)", lines[number]):
            end = lines.index("```", number + 1)
            said = [line for line in before if line.strip()][-1:]
            file = re.search(r"`([^`]+)`:$", said[0]) if said else None
            reason = re.fullmatch(r"<!-- not run: (.+) -->", said[0]) if said else None
            text = "\n".join(lines[number + 1 : end]) + "\n"
            found.append(Block(match[1], text, number + 1, file and file[1], reason and reason[1]))  # type: ignore[arg-type]
            number, before = end + 1, []
        else:
            before.append(lines[number])
            number += 1
    return found


class Page:
    """A page that is being run."""

    def __init__(self, path: Path, folder: Path, environment: dict[str, str]):
        self.path = path
        self.folder = folder
        self.environment = os.environ | environment
        self.output = ""
        self.is_output_known = False
        self.groups: list[int] = []
        self.count = 0
        self.port = str(free_port())

    def run(self) -> int:
        """Run all blocks; return how many were run."""
        try:
            text = re.sub(rf"\b{PORT}\b", self.port, self.path.read_text(encoding="utf-8"))
            for block in blocks(text):
                self._block(block)
        finally:
            for group in self.groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGTERM)
        return self.count

    def _block(self, block: Block) -> None:
        where = f"{self.path.name}, line {block.line}"
        if block.not_run is not None:
            self.is_output_known = False
        elif block.file is not None:
            (self.folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language in RUN:
            self._execute(block, where)
        elif block.language == "text" and self.is_output_known:
            self._compare(block, where)
        else:
            assert block.language in ("", "text", "rust", "toml", *DATA), f"{where}: what is `{block.language}`?"

    def _execute(self, block: Block, where: str) -> None:
        log = self.folder / f".block-{self.count}.log"
        command = (
            ["bash", "-euo", "pipefail", "-c", block.text]
            if block.language == "sh"
            else [sys.executable, "-c", block.text]
        )
        # To a file: what goes on in the background keeps a pipe open.
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            self.groups.append(process.pid)
            status = process.wait(PATIENCE)
        self.output = log.read_text(encoding="utf-8", errors="replace")
        self.is_output_known = True
        self.count += 1
        assert status == 0, f"{where} ends with {status}:\n{block.text}\n{self.output}"

    def _compare(self, block: Block, where: str) -> None:
        at = 0
        printed = self.output.splitlines()
        for line in block.text.splitlines():
            pattern = ".*".join(map(re.escape, line.split("...")))
            if line.strip() in ("", "..."):
                continue
            found = next((i for i in range(at, len(printed)) if re.search(pattern, printed[i])), None)
            assert found is not None, f"{where}: `{line}` was not printed, or not there:\n{self.output}"
            at = found + 1
