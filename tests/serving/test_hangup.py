"""SIGHUP of a server without a keys file: a terminal that is gone ends it, a service manager's reload does not."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2 as httpx

from .conftest import ADAPTERS, server_flags


@contextmanager
def served(*, terminal: bool) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a session of its own, with a terminal or without; and where it listens."""
    parent, child = pty.openpty()

    def take_terminal() -> None:
        if terminal:
            fcntl.ioctl(child, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-m", "manylora", "serve", *server_flags()], cwd=ADAPTERS, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=take_terminal, pass_fds=[child],
    )  # fmt: skip
    os.close(child)
    try:
        yield process, wait_for(process, r"listening on (\S+)")
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def wait_for(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stderr is not None
    shown = ""
    for line in process.stderr:
        shown += line
        if found := re.search(pattern, line):
            return found[found.re.groups]
    raise AssertionError(shown)


def test_a_service_stays_and_says_that_there_is_nothing_to_read() -> None:
    with served(terminal=False) as (process, url):
        process.send_signal(signal.SIGHUP)
        wait_for(process, "SIGHUP: there is no keys file to read again")
        assert httpx.get(f"{url}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_terminal_that_is_gone_ends_its_server() -> None:
    with served(terminal=True) as (process, _):
        process.send_signal(signal.SIGHUP)
        assert process.wait(20) == -signal.SIGHUP
