"""The examples that serve, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .conftest import ADAPTERS, ORACLE

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "serve_and_churn.sh"
FLAGS = ["--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "32M"]


def run(*given: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(SCRIPT), *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_serve_and_churn() -> None:
    adapters = [str(ADAPTERS / name) for name in ("alpha", "beta", "gamma")]
    done = run(str(ORACLE / "llama" / "base"), *adapters, *FLAGS)
    assert done.returncode == 0, done.stderr
    for told in ("[base] ", "[alpha] ", "[beta] ", "[gamma] ", "'gamma' added", "'gamma' removed"):
        assert told in done.stdout
    assert done.stdout.endswith("[gamma] is answered with status 404 now\n")


def test_serve_and_churn_says_why_a_server_does_not_start() -> None:
    done = run("/nowhere/base", *(str(ADAPTERS / name) for name in ("alpha", "beta", "gamma")), *FLAGS)
    assert done.returncode == 1
    assert "/nowhere/base" in done.stderr
    assert run("only-one").returncode == 2
