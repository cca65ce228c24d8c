"""`manylora bench serve` as a user runs it: against a live server, and against what is none."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from .conftest import PROMPT, Server, StartServer

SHORT = ["--num-prompts", "12", "--input-len", "4:8", "--output-len", "6", "--disable-tqdm"]


def bench(url: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manylora", "bench", "serve", "--base-url", url, *SHORT, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


def result_of(url: str, folder: Path, *flags: str) -> dict[str, Any]:
    file = folder / "result.json"
    done = bench(url, "--output", str(file), "--save-detailed", *flags)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["failures"] == {}
    return result


def test_a_run_against_a_live_server(server: Server, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    flags = ["--request-rate", "200", "--popularity", "distinct", "--base-share", "0.25", "--num-warmups", "2"]
    result = result_of(server.url, tmp_path, *flags, "--report", str(report), "--goodput", "e2el:60000")
    assert (result["completed"], result["failed"]) == (12, 0)
    assert (result["model_id"], result["request_rate"], result["popularity"]) == ("base", 200, "distinct")
    # Prompts of the server's own tokens have exactly the length that was drawn, by the server's count.
    assert all(4 <= length <= 8 for length in result["input_lens"])
    assert result["output_lens"] == [6] * 12
    assert (result["total_output_tokens"], result["output_tokens_counted_by"]) == (72, "server")
    assert Counter(result["models"]) == {"base": 3, "alpha": 5, "beta": 4}
    rows = result["adapters"]
    assert {name: row["completed"] for name, row in rows.items()} == Counter(result["models"])
    assert [name for name, row in rows.items() if row["is_base"]] == ["base"]
    assert result["request_goodput"] == result["request_throughput"]
    for name in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "median", "std", "p50", "p90", "p99"):
            assert result[f"{kind}_{name}_ms"] >= 0
    for first, whole in zip(result["ttfts"], result["e2els"], strict=True):
        assert 0 < first <= whole
    assert report.read_text().count("<svg") == 6


def test_what_is_timed_is_what_the_server_answers(server: Server, tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    models = ["alpha", "base", "beta"]
    dataset.write_text(
        "\n".join(json.dumps({"prompt": PROMPT, "output_tokens": 8, "model": model}) for model in models)
    )
    flags = ["--dataset-path", str(dataset), "--disable-shuffle", "--ignore-eos"]
    result = result_of(server.url, tmp_path, *flags)
    assert result["models"] == models * 4
    assert result["generated_texts"] == [server.text(model) for model in models] * 4


def test_the_same_seed_is_the_same_load(server: Server, tmp_path: Path) -> None:
    flags = ["--popularity", "zipf:1.5", "--request-rate", "500"]
    keys = ("models", "input_lens", "output_lens", "generated_texts")
    one, again, other = (result_of(server.url, tmp_path, *flags, "--seed", seed) for seed in ("1", "1", "2"))
    assert [one[key] for key in keys] == [again[key] for key in keys]
    assert one["generated_texts"] != other["generated_texts"]


def test_chats_and_at_most_so_many_at_a_time(server: Server, tmp_path: Path) -> None:
    result = result_of(f"{server.url}/v1", tmp_path, "--backend", "openai-chat", "--max-concurrency", "2")
    assert result["total_output_tokens"] == 72
    assert result["max_concurrent_requests"] == 2
    assert result["mean_wait_for_place_ms"] > 0


def test_an_adapter_that_is_not_there_is_counted_with_its_reason(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = bench(server.url, "--adapters", "alpha,nope", "--popularity", "distinct", "--output", str(file))
    assert done.returncode == 0
    result = json.loads(file.read_text())
    (reason,) = result["failures"]
    assert reason.startswith("HTTP 404: The model `nope` does not exist")
    assert (result["completed"], result["failed"], result["failures"][reason]) == (6, 6, 6)
    assert result["adapters"]["nope"]["failed"] == 6
    assert f"6 x {reason}" in done.stdout
    every = bench(server.url, "--lora-modules", "nope", "nor")
    assert every.returncode == 1
    assert "0 / 12" in every.stdout
    warm = bench(server.url, "--adapters", "nope", "--num-warmups", "1")
    assert warm.returncode == 1
    assert "no request of the warm-up was completed; the first said: HTTP 404" in warm.stderr


def test_keys_are_sent(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--api-key", "secret")
    assert result_of(server.url, tmp_path, "--api-key", "secret")["completed"] == 12
    done = bench(server.url)
    assert done.returncode == 2
    assert "lists no models: HTTP 401" in done.stderr
    assert result_of(server.url, tmp_path, "--header", "Authorization=Bearer secret")["completed"] == 12


class Impostor(BaseHTTPRequestHandler):
    """Lists models as OpenAI's API does, and completes nothing as it does."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(b'{"data": [{"id": "m", "parent": null}]}', "application/json")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("stream") and asked["max_tokens"] == 7:
            self.close_connection = True
            self.wfile.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nda"
            )
            return
        self.answer(b'{"choices": [{"text": "whole"}]}', "application/json")

    def answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def impostor() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Impostor)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_is_no_stream_is_told(impostor: str) -> None:
    done = bench(impostor)
    assert done.returncode == 1
    assert "12 x the answer is no stream of events, but `application/json`" in done.stdout
    broken = bench(impostor, "--output-len", "7")
    assert broken.returncode == 1
    assert "12 x the connection was closed in the middle of the answer" in broken.stdout


def test_certificates_are_checked_unless_told_otherwise(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Impostor)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"https://127.0.0.1:{server.server_address[1]}"
    try:
        unknown = bench(url)
        assert "certificate verify failed" in unknown.stderr.splitlines()[-1]
        for trusting in (bench(url, "--insecure"), bench(url, SSL_CERT_FILE=str(tmp_path / "authority.pem"))):
            assert "12 x the answer is no stream of events" in trusting.stdout, trusting.stderr
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("flags", "status", "told"),
    [
        (["--base-url", "http://127.0.0.1:9"], 2, "is the server running?"),
        (["--base-url", "ftp://x"], 2, "no URL of a server"),
        (["--popularity", "zip"], 2, "`zip` is no popularity"),
        (["--request-rate", "0"], 2, "--request-rate: must be a number above 0"),
        (["--burstiness", "-1"], 2, "--burstiness"),
        (["--base-share", "1.5"], 2, "from 0 to 1"),
        (["--input-len", "9:3"], 2, "`9:3` is no length"),
        (["--goodput", "itl:3"], 2, "ttft, tpot or e2el"),
        (["--extra-body", "[]"], 2, "must be a JSON object"),
        (["--report", "x.pdf"], 2, "must end in .html or .png"),
        (["--output", "/nowhere/x.json"], 2, "there is no folder `/nowhere`"),
        (["--dataset-path", "/nowhere"], 2, "`/nowhere` cannot be read"),
        (["--dataset-name", "custom"], 2, "needs --dataset-path"),
        (["--num-prompt", "3"], 2, "did you mean --num-prompts?"),
    ],
)
def test_wrong_flags_are_one_line(impostor: str, flags: list[str], status: int, told: str) -> None:
    done = bench(impostor, *flags)
    assert done.returncode == status, done.stderr
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
