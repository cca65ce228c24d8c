"""HTTP/1.1 as far as a load generator needs it, on the standard library.

What arrives is stamped the moment that the loop hands it over, before anything is made of it: a client that parses
first would add its own work to the gaps between tokens, most of all when 200 streams get a token at the same moment. It
is also cheaper than a general client, which counts where server and load share a machine.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from manylora.bench.response import ResponseReader, TransferError
from manylora.exceptions import ValidationError


@dataclass
class Answer:
    """A complete response.

    Attributes:
        sent: when the request was handed over, the time to connect included in what follows.
        pieces: the body as it came, each part with its time.
        ended: when the last byte was there.

    """

    status: int
    headers: dict[str, str]
    sent: float
    pieces: list[tuple[float, bytes]]
    ended: float

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(piece for _, piece in self.pieces)


@dataclass
class _Exchange:
    """A request under way."""

    sent: float
    waiter: asyncio.Future[Answer]
    reader: ResponseReader = field(default_factory=ResponseReader)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    def fail(self, error: Exception) -> None:
        if not self.waiter.done():
            self.waiter.set_exception(error)


class _Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def begin(self, request: bytes, exchange: _Exchange) -> None:
        assert self._transport is not None
        self._exchange = exchange
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        exchange = self._exchange
        if exchange is None:
            self.close()
            return
        try:
            body = exchange.reader.feed(data)
        except TransferError as error:
            self._exchange = None
            exchange.fail(error)
            self.close()
            return
        if body:
            exchange.pieces.append((now, body))
        if exchange.reader.is_complete:
            self._finish(exchange, now)

    def connection_lost(self, error: Exception | None) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        try:
            exchange.reader.end()
        except TransferError as early:
            exchange.fail(TransferError(f"{early} ({error})") if error else early)
        else:
            self._finish(exchange, self._clock())

    def _finish(self, exchange: _Exchange, now: float) -> None:
        self._exchange = None
        reader = exchange.reader
        if not reader.keeps_alive:
            self.close()
        if not exchange.waiter.done():
            exchange.waiter.set_result(Answer(reader.status, reader.headers, exchange.sent, exchange.pieces, now))


class Client:
    """Sends requests to one server, over as many connections as there are requests at a time."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, verifies: bool = True):
        """Make a client of the server at `url`, whose path is put before every request's.

        Certificates are checked against the system's authorities, or SSL_CERT_FILE's, unless it `verifies` nothing.

        Raises:
            ValidationError: the URL is none of HTTP.

        """
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ValidationError(f"`{url}` is no URL of a server: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValidationError(f"`{url}` is no URL of a server, such as http://127.0.0.1:8000")
        self.url = url
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        if self._tls is not None and not verifies:
            self._tls.check_hostname = False
            self._tls.verify_mode = ssl.CERT_NONE
        self._port = port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        given = {"Host": parts.netloc.rpartition("@")[2], "Accept-Encoding": "identity"} | dict(headers or {})
        for name, value in given.items():
            if any(mark in name + value for mark in "\r\n"):
                raise ValidationError(f"the header `{name}` must be one line")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self._idle: list[_Connection] = []

    async def send(self, method: str, path: str, body: bytes = b"", seconds: float | None = None) -> Answer:
        """Send a request and return its complete answer, whatever its status.

        Raises:
            TransferError: there is no complete answer, within `seconds` if they are given.

        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        request = f"{head}\r\n".encode("latin-1") + body
        try:
            return await asyncio.wait_for(self._exchange(request), seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise TransferError(f"no complete answer within {seconds:g} s") from None
        except OSError as error:
            raise TransferError(f"no connection to {self.url}: {error.strerror or error}") from error

    async def _exchange(self, request: bytes) -> Answer:
        loop = asyncio.get_running_loop()
        sent = loop.time()
        while True:
            connection, is_new = await self._connection(loop)
            exchange = _Exchange(sent, loop.create_future())
            connection.begin(request, exchange)
            try:
                answer = await exchange.waiter
            except TransferError:
                connection.close()
                if is_new or exchange.reader.status:
                    raise
                # The server had closed it while nobody asked.
                continue
            except asyncio.CancelledError:
                connection.close()
                raise
            if connection.is_open:
                self._idle.append(connection)
            return answer

    async def _connection(self, loop: asyncio.AbstractEventLoop) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection, False
        _, connection = await loop.create_connection(
            lambda: _Connection(loop.time), self._host, self._port, ssl=self._tls
        )
        return connection, True

    def close(self) -> None:
        """Close the connections that nobody uses."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
