"""Stopping: what runs is finished, what comes is told so, and nothing holds a server for ever."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2 as httpx

from .conftest import ORACLE, PROMPT, Server, StartServer, events
from .test_bad_requests import connect

LONG = {"prompt": [PROMPT] * 48, "max_tokens": 480, "ignore_eos": True, "stream": True}


class Running:
    """A request that takes long, on a thread of its own."""

    def __init__(self, server: Server, body: dict[str, object]):
        self.text = ""
        self.failed = False
        begun = threading.Event()

        def run() -> None:
            try:
                with server.client.stream("POST", "/v1/completions", json=body) as answer:
                    begun.set()
                    for part in answer.iter_text():
                        self.text += part
            except httpx.TransportError:
                self.failed = True
            finally:
                begun.set()

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert begun.wait(20)


def begin(server: Server, line: str) -> socket.socket:
    """A request of which a part is there."""
    connection = connect(server)
    connection.sendall(f"{line} HTTP/1.1\r\nHost: x\r\n".encode())
    return connection


def end(connection: socket.socket, body: bytes = b"") -> str:
    length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
    connection.sendall(f"{length}\r\n".encode() + body)
    text = b""
    while part := connection.recv(1 << 16):
        text += part
    connection.close()
    return text.decode()


def test_what_comes_while_it_stops_is_told_to_go_elsewhere(start_server: StartServer) -> None:
    server = start_server()
    paths = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    late = [begin(server, f"POST {path}") for path in paths]
    health, metrics = begin(server, "GET /health"), begin(server, "GET /metrics")
    time.sleep(0.2)
    running = Running(server, LONG)
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            connect(server).close()
        except ConnectionError:
            break
        time.sleep(0.02)
    bodies = (
        b'{"prompt": [5]}',
        b'{"messages": [{"role": "user", "content": "x"}]}',
        b'{"prompt": "x"}',
        b'{"tokens": [5]}',
    )
    for connection, body in zip(late, bodies, strict=True):
        answer = end(connection, body)
        assert answer.startswith("HTTP/1.1 503 "), answer
        assert "retry-after: 5" in answer
        assert "shutting down" in answer
    assert end(health).startswith("HTTP/1.1 503 ")
    rejections = [line for line in end(metrics).splitlines() if line.startswith("vllm:admission_rejections_total{")]
    assert [line.split()[-1] for line in rejections if 'reason="draining"' in line] == ["4"], rejections
    running.thread.join()
    told = events(running.text)
    assert told.pop() is None
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in told]
    assert [reason for reason in reasons if reason] == ["length"] * 48
    assert server.process.wait(20) == 0


def test_what_runs_too_long_is_ended(start_server: StartServer) -> None:
    server = start_server("--shutdown-timeout", "0.2", "--max-num-seqs", "1")
    running = Running(server, LONG)
    assert server.stop() == 0
    running.thread.join()
    assert running.failed
    assert "[DONE]" not in running.text
    assert "requests that still ran after 0.2 s were ended" in server.log


def test_a_second_signal_ends_it_at_once(start_server: StartServer) -> None:
    server = start_server("--shutdown-timeout", "600", "--max-num-seqs", "1")
    running = Running(server, LONG)
    server.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 10
    while "shutting down: waiting for 1 requests, up to 600 s" not in server.log and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.process.poll() is None
    assert server.stop() == 0
    running.thread.join()
    # It was not waited for.
    assert running.failed


# The command, with an engine that ends half a second after the server listens.
SCRIPT = """
import sys, threading
from manylora.cli import main, serve

class Ending(serve.LLM):
    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        serve._ready = lambda *_: threading.Timer(0.5, self._core.close).start()

serve.LLM = Ending
sys.exit(main(["serve", sys.argv[1], "--device", "cpu", "--port", "0"]))
"""


def test_a_server_without_an_engine_ends() -> None:
    base = str(ORACLE / "llama" / "base")
    done = subprocess.run([sys.executable, "-c", SCRIPT, base], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "the engine has stopped" in done.stderr
    assert "Traceback" not in done.stderr
