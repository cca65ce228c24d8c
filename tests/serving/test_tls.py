"""Encrypted connections: real handshakes, certificates of clients, files that change, clients that never finish."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
import trustme

from manylora.cli import main

from .conftest import ADAPTERS, PROMPT, Server, StartServer, events, server_flags

ON = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
# What the server gives a handshake, and some time for a busy machine.
PATIENCE = 10 + 10
CertificateFiles = Callable[..., list[str]]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    """What a client has that trusts the authority."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def write(folder: Path, certificate: trustme.LeafCert) -> list[str]:
    """Write a certificate and its key; return the flags that name them."""
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(key)
    return ["--ssl-certfile", str(chain), "--ssl-keyfile", str(key)]


def address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("https://").split(":")
    return host, int(port)


def serial(server: Server, context: ssl.SSLContext) -> str:
    """The number of the certificate that a new connection is shown."""
    with (
        socket.create_connection(address(server), 20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
    ):
        shown = encrypted.getpeercert()
        assert shown
        return str(shown["serialNumber"])


@pytest.fixture(scope="module")
def server(
    authority: trustme.CA, trusting: ssl.SSLContext, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """An encrypted server that can be managed from this machine."""
    files = write(tmp_path_factory.mktemp("tls"), authority.issue_cert("127.0.0.1"))
    server = Server(server_flags(*files), ADAPTERS, ON)
    server.client = httpx.Client(base_url=server.url, verify=trusting, timeout=60)
    yield server
    server.close()


@pytest.fixture(scope="module")
def stuck(server: Server) -> Iterator[list[socket.socket]]:
    """Clients that began what they never finish."""
    context = ssl.create_default_context()
    hello = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="127.0.0.1").do_handshake()
    first = hello.read()
    connections = [socket.create_connection(address(server), PATIENCE) for _ in range(60)]
    for number, connection in enumerate(connections):
        # Nothing; half of what a client says first; all of it, and then nothing.
        connection.sendall((b"", first[: len(first) // 2], first)[number % 3])
    yield connections
    for connection in connections:
        connection.close()


def test_answers_and_streams_are_encrypted(server: Server, stuck: object) -> None:
    assert server.url.startswith("https://")
    assert "curl" not in server.log
    text = server.text("base")
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        parts = events(answer.read().decode())
    assert parts.pop() is None
    assert "".join(part["choices"][0]["text"] for part in parts) == text
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(server.url + "/health")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_versions_and_protocols(server: Server, authority: trustme.CA, version: ssl.TLSVersion) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(address(server), 20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
    ):
        assert encrypted.selected_alpn_protocol() == "http/1.1"
        encrypted.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert encrypted.recv(1000).startswith(b"HTTP/1.1 200 OK")


def test_who_asks_without_encryption_is_told(server: Server) -> None:
    answer = httpx.get(server.url.replace("https:", "http:") + "/health")
    assert answer.status_code == 400
    assert "https://" in answer.text


def test_a_48_the_loopback_rule_holds_for_encrypted_connections(server: Server) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"X-Forwarded-For": "127.0.0.1"}):
        answer = server.client.post(
            "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "alpha"}, headers=headers
        )
        assert answer.status_code == 401, headers
    assert server.load("alpha", "alpha").status_code == 200
    assert server.unload("alpha").status_code == 200


def test_handshakes_that_never_end_hold_nobody_up(
    server: Server, stuck: list[socket.socket], trusting: ssl.SSLContext
) -> None:
    with httpx.Client(base_url=server.url, verify=trusting) as client:
        assert client.get("/health").status_code == 200
    for connection in stuck:
        # Whatever the server said, then the end.
        while connection.recv(1 << 16):
            pass


def test_handshakes_that_never_end_do_not_keep_a_server_alive(
    start_server: StartServer, authority: trustme.CA, tmp_path: Path
) -> None:
    both = tmp_path / "both.pem"
    certificate = authority.issue_cert("127.0.0.1")
    # The key may be in the certificate's file.
    both.write_bytes(certificate.private_key_and_cert_chain_pem.bytes())
    flags = ("--admin-api-key", "k", "--host", "0.0.0.0", "--log-level", "debug")
    server = start_server("--ssl-certfile", str(both), *flags, **ON)
    assert server.url.startswith("https://0.0.0.0:")
    host, port = "127.0.0.1", int(server.url.rsplit(":", 1)[1])
    connections = [socket.create_connection((host, port)) for _ in range(3)]
    connections[0].sendall(b"\x16\x03\x01")
    assert server.stop() == 0
    # None of them was given the time that it might have had.
    assert "no encryption was agreed on" not in server.log
    for connection in connections:
        connection.close()


def test_a_made_key_is_shown_with_the_right_address(
    start_server: StartServer, authority: trustme.CA, tmp_path: Path
) -> None:
    server = start_server(*write(tmp_path, authority.issue_cert("127.0.0.1")), "--api-key", "user", **ON)
    assert f"curl -X POST {server.url}/v1/load_lora_adapter" in server.log


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it never was"
        time.sleep(0.1)


def test_files_are_read_again_when_they_change(
    start_server: StartServer, authority: trustme.CA, trusting: ssl.SSLContext, tmp_path: Path
) -> None:
    server = start_server(*write(tmp_path, authority.issue_cert("127.0.0.1")), "--enable-ssl-refresh")
    first = serial(server, trusting)
    kept = httpx.Client(base_url=server.url, verify=trusting)
    assert kept.get("/health").status_code == 200
    (tmp_path / "chain.pem").write_text("half of it")
    wait_until(lambda: "the certificate from before stays" in server.log)
    assert serial(server, trusting) == first
    write(tmp_path, authority.issue_cert("127.0.0.1"))
    wait_until(lambda: serial(server, trusting) != first)
    # Connections from before go on.
    assert kept.get("/health").status_code == 200
    kept.close()


@pytest.mark.parametrize("required", [1, 2])
def test_certificates_of_clients(
    start_server: StartServer, authority: trustme.CA, tmp_path: Path, required: int
) -> None:
    root = tmp_path / "root.pem"
    authority.cert_pem.write_to_path(root)
    server = start_server(
        *write(tmp_path, authority.issue_cert("127.0.0.1")),
        "--ssl-ca-certs",
        str(root),
        "--ssl-cert-reqs",
        str(required),
    )

    def ask(certificate: trustme.LeafCert | None) -> int:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        if certificate is not None:
            certificate.configure_cert(context)
        with httpx.Client(verify=context) as client:
            return client.get(server.url + "/health").status_code

    assert ask(authority.issue_cert("client@example.org")) == 200
    with pytest.raises(httpx.TransportError):
        ask(trustme.CA().issue_cert("client@example.org"))
    if required == 1:
        assert ask(None) == 200
    else:
        with pytest.raises(httpx.TransportError):
            ask(None)


def test_files_that_cannot_be_used_are_named_with_the_reason(
    authority: trustme.CA, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = write(tmp_path, authority.issue_cert("127.0.0.1"))
    _, chain, _, key = flags
    other = tmp_path / "other.pem"
    authority.issue_cert("127.0.0.1").private_key_pem.write_to_path(other)
    text, encrypted, der = tmp_path / "text.pem", tmp_path / "encrypted.pem", tmp_path / "torn.pem"
    text.write_text("nothing of the kind\n")
    encrypted.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n")
    der.write_text("-----BEGIN CERTIFICATE-----\nnot base64!\n-----END CERTIFICATE-----\n")
    cases: list[tuple[list[str], list[str]]] = [
        (["--ssl-certfile", "/nowhere.pem", "--ssl-keyfile", key], ["ssl_certfile `/nowhere.pem`", "No such file"]),
        (["--ssl-certfile", chain, "--ssl-keyfile", "/nowhere.pem"], ["ssl_keyfile `/nowhere.pem`", "No such file"]),
        (["--ssl-certfile", str(text), "--ssl-keyfile", key], [f"ssl_certfile `{text}`", "no PEM certificate"]),
        (["--ssl-certfile", str(der), "--ssl-keyfile", key], [f"ssl_certfile `{der}`", "it is not PEM"]),
        (["--ssl-certfile", chain, "--ssl-keyfile", str(text)], [f"ssl_keyfile `{text}`", "no PEM private key"]),
        (["--ssl-certfile", chain], [f"ssl_certfile `{chain}`", "no PEM private key"]),
        (["--ssl-certfile", chain, "--ssl-keyfile", str(encrypted)], [f"ssl_keyfile `{encrypted}`", "is encrypted"]),
        (["--ssl-certfile", chain, "--ssl-keyfile", str(other)], [f"ssl_keyfile `{other}`", "is not the key", chain]),
        (["--ssl-keyfile", key], ["--ssl-certfile too"]),
        (["--enable-ssl-refresh"], ["--ssl-certfile too"]),
        ([*flags, "--ssl-ca-certs", chain], ["ssl_cert_reqs is 0"]),
        ([*flags, "--ssl-cert-reqs", "2"], ["--ssl-ca-certs too"]),
        ([*flags, "--ssl-cert-reqs", "1", "--ssl-ca-certs", str(text)], [f"ssl_ca_certs `{text}`"]),
        ([*flags, "--ssl-cert-reqs", "3", "--ssl-ca-certs", chain], ["got `3`"]),
    ]
    for given, told in cases:
        # Before the base is looked for, which is not there.
        assert main(["serve", "/nowhere/at-all", "--port", "0", *given]) == 2
        message = capsys.readouterr().err
        assert all(part in message for part in told), message
