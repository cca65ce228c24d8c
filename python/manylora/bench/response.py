"""The bytes of an HTTP/1.1 response."""

from __future__ import annotations

import enum

from manylora.exceptions import ManyLoRAError

_LONGEST_HEAD = 1 << 16


class TransferError(ManyLoRAError):
    """A request got no complete answer."""


class _Expecting(enum.Enum):
    HEAD = enum.auto()
    SIZE = enum.auto()
    CHUNK = enum.auto()
    CHUNK_END = enum.auto()
    TRAILER = enum.auto()
    LENGTH = enum.auto()
    CLOSE = enum.auto()
    NOTHING = enum.auto()


class ResponseReader:
    """Takes the bytes of one response apart, however they were cut on their way.

    Attributes:
        status: once the head is there; 0 before.
        headers: by their names in lower case.

    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._buffer = bytearray()
        self._expecting = _Expecting.HEAD
        self._left = 0
        self._version = b""

    @property
    def is_complete(self) -> bool:
        """Whether the whole response is there."""
        return self._expecting is _Expecting.NOTHING

    @property
    def keeps_alive(self) -> bool:
        """Whether another request may follow on the connection."""
        closes = "close" in self.headers.get("connection", "").lower()
        return self.is_complete and self._version == b"HTTP/1.1" and not closes and not self._buffer

    def feed(self, data: bytes) -> bytes:
        """Take bytes, and return those of the body that were in them.

        Raises:
            TransferError: they are not HTTP.

        """
        parts: list[bytes] = []
        if self._expecting is _Expecting.SIZE and not self._buffer:
            data = _take_whole_chunks(data, parts)
            if not data:
                return b"".join(parts)
        self._buffer += data
        body = bytearray().join(parts)
        while self._advance(body):
            pass
        return bytes(body)

    def end(self) -> None:
        """Take note that the connection was closed.

        Raises:
            TransferError: too early.

        """
        if self._expecting is _Expecting.CLOSE:
            self._expecting = _Expecting.NOTHING
        elif not self.is_complete:
            raise TransferError(
                "the connection was closed in the middle of the answer"
                if self.status
                else "the connection was closed before the answer"
            )

    def _advance(self, body: bytearray) -> bool:
        """Go one step; whether there may be another with what is there."""
        match self._expecting:
            case _Expecting.HEAD:
                end = self._buffer.find(b"\r\n\r\n")
                if end < 0:
                    if len(self._buffer) > _LONGEST_HEAD:
                        raise TransferError("the answer does not begin as one of HTTP/1.1 does")
                    return False
                head = bytes(self._buffer[:end])
                del self._buffer[: end + 4]
                self._read_head(head)
                return True
            case _Expecting.SIZE | _Expecting.TRAILER | _Expecting.CHUNK_END:
                end = self._buffer.find(b"\r\n")
                if end < 0:
                    return False
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 2]
                self._read_line(line)
                return True
            case _Expecting.CHUNK | _Expecting.LENGTH:
                taken = min(self._left, len(self._buffer))
                body += self._buffer[:taken]
                del self._buffer[:taken]
                self._left -= taken
                if self._left:
                    return False
                is_chunk = self._expecting is _Expecting.CHUNK
                self._expecting = _Expecting.CHUNK_END if is_chunk else _Expecting.NOTHING
                return is_chunk
            case _Expecting.CLOSE:
                body += self._buffer
                self._buffer.clear()
                return False
            case _Expecting.NOTHING:
                return False

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        parts = first.split(b" ", 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise TransferError("the answer does not begin as one of HTTP/1.1 does")
        self._version, self.status = parts[0], int(parts[1])
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
        if 100 <= self.status < 200:
            # Only a notice that the answer will come.
            self.status, self.headers = 0, {}
        elif self.status in (204, 304):
            self._expecting = _Expecting.NOTHING
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._expecting = _Expecting.SIZE
        elif "content-length" in self.headers:
            length = self.headers["content-length"]
            if not length.isdigit():
                raise TransferError(f"the answer has the content-length `{length}`")
            self._left = int(length)
            self._expecting = _Expecting.LENGTH if self._left else _Expecting.NOTHING
        else:
            self._expecting = _Expecting.CLOSE

    def _read_line(self, line: bytes) -> None:
        match self._expecting:
            case _Expecting.SIZE:
                try:
                    self._left = int(line.split(b";")[0].strip(), 16)
                except ValueError:
                    raise TransferError(f"a chunk of the answer has the size `{line[:40]!r}`") from None
                self._expecting = _Expecting.CHUNK if self._left else _Expecting.TRAILER
            case _Expecting.CHUNK_END:
                if line:
                    raise TransferError("a chunk of the answer is longer than it says")
                self._expecting = _Expecting.SIZE
            case _:
                if not line:
                    self._expecting = _Expecting.NOTHING


def _take_whole_chunks(data: bytes, parts: list[bytes]) -> bytes:
    """Take the chunks that are wholly there, and return what follows them: what nearly all of a stream comes as."""
    place = 0
    while (end := data.find(b"\r\n", place)) > 0:
        digits = data[place:end]
        if not digits.isalnum():
            break
        try:
            size = int(digits, 16)
        except ValueError:
            break
        stop = end + 2 + size
        if size == 0 or data[stop : stop + 2] != b"\r\n":
            break
        parts.append(data[end + 2 : stop])
        place = stop + 2
    return data[place:]
