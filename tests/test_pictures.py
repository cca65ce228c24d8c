"""Pictures as PNG are what their ending says: whole, and as large as what they show needs."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from manylora.cli import main

SIM = [
    "sim", "--model", "SmolLM2-135M-Instruct", "--gpu", "l4", "--adapters", "8", "--rate", "20", "--duration", "5",
]  # fmt: skip


def size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG, each chunk of which is checked."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    place, chunks = 8, []
    while place < len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        body = data[place + 8 : place + 8 + length]
        (check,) = struct.unpack_from(">I", data, place + 8 + length)
        assert check == zlib.crc32(kind + body), kind
        chunks.append((kind, body))
        place += 12 + length
    assert (chunks[0][0], chunks[-1]) == (b"IHDR", (b"IEND", b""))
    width, height = struct.unpack_from(">II", chunks[0][1])
    lines = zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT"))
    assert len(lines) % height == 0
    assert len(set(lines)) > 20, "nothing is drawn"
    return width, height


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ([], 2),
        (["--sweep", "rate=5,10,20"], 3),
        (["--sweep", "rate=5,10,20", "--sweep", "max_cpu_loras=2,8"], 5),
    ],
)
def test_simulations(tmp_path: Path, flags: list[str], rows: int) -> None:
    path = tmp_path / "picture.png"
    assert main([*SIM, *flags, "--plot", str(path)]) == 0
    assert size(path) == (1320, int(3.6 * rows * 110))


def test_plans(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    assert main(["plan", "--model", "Qwen2.5-7B-Instruct", "--gpu", "rtx4090", "--plot", str(path)]) == 0
    width, height = size(path)
    assert width > 300
    assert height > 50
