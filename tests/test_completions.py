"""`manylora completions`: what real shells make of the scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from manylora.cli import build_parser
from manylora.cli.completions import SHELLS, described


def script(shell: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "manylora", "completions", shell], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stderr == ""
    return ran.stdout


def completed(shell: str, file: Path, line: str, folder: Path) -> set[str]:
    """What a shell offers at the end of a line."""
    if shell == "bash":
        # As readline cuts words: at spaces, and around `=`.
        words = [word for word in re.split(r"(=)| ", line) if word is not None]
        quoted = " ".join(f"'{word}'" for word in words)
        code = (
            f"source {file}; complete -p manylora >/dev/null || exit 3; COMP_WORDS=({quoted}); "
            f"COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); _manylora; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        )
        command = ["bash", "--norc", "-c", code]
    else:
        command = ["fish", "--no-config", "-c", f"source {file}; complete -C '{line}'"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    return {one.split("\t")[0] for one in ran.stdout.splitlines() if one}


CASES = [
    ("manylora ", {"serve", "chat", "merge", "inspect", "doctor", "completions", "bench", "sim"}, {"replay"}),
    ("manylora serv", {"serve"}, {"sim"}),
    ("manylora bench ", {"serve"}, {"chat"}),
    ("manylora bench serve --num-p", {"--num-prompts"}, {"--model"}),
    ("manylora serve --max-lora-r", {"--max-lora-rank"}, {"--max-loras"}),
    ("manylora serve BASE --dtype ", set(), {"--dtype"}),
    ("manylora merge --dtype ", {"auto", "float32", "bfloat16", "float16"}, {"--dtype"}),
    ("manylora merge --dtype b", {"bfloat16"}, {"float16"}),
    ("manylora merge --dtype=b", {"bfloat16"}, {"float16"}),
    ("manylora completions ", {"bash", "zsh", "fish"}, {"serve"}),
    ("manylora sim ", {"calibrate", "replay"}, {"serve"}),
    ("manylora sim replay --c", {"--calibration"}, {"--config"}),
    ("manylora inspect some", {"some file.safetensors", "somewhere"}, {"other"}),
    ("manylora inspect x --base some", {"some file.safetensors", "somewhere"}, {"other"}),
]


@pytest.mark.parametrize("shell", [shell for shell in ("bash", "fish") if shutil.which(shell)])
def test_shells_complete(shell: str, tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(script(shell))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("some file.safetensors", "somewhere", "other"):
        (folder / name).touch()
    for line, wanted, unwanted in CASES:
        found = completed(shell, file, line, folder)
        # Fish gives a flag's value back with its flag, and quotes what has spaces.
        found = {re.sub(r"^--\w+=", "", one).replace("\\ ", " ") for one in found}
        assert wanted <= found, (line, found)
        assert not unwanted & found, (line, found)
        if line.startswith("manylora merge --dtype"):
            assert found == wanted, line


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_scripts_are_right_to_their_shells(shell: str, tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(script(shell))
    flag = "--no-execute" if shell == "fish" else "-n"
    ran = subprocess.run([shell, flag, str(file)], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes(tmp_path: Path) -> None:
    """In a terminal of its own: what is offered is what is written there."""
    (tmp_path / "_manylora").write_text(script("zsh"))
    for line, wanted in (
        ("manylora ins", "inspect"), ("manylora bench se", "serve"), ("manylora serve --max-lora-r", "--max-lora-rank"),
        ("manylora merge --dtype b", "bfloat16"), ("manylora sim repl", "replay"), ("manylora completions f", "fish"),
    ):  # fmt: skip
        code = f"""
            zmodload zsh/zpty
            zpty shell zsh -f -i
            zpty -w shell 'PS1=READY; fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u -d {tmp_path}/dump; '
            zpty -w shell 'echo begun'
            zpty -m -r shell said $'*begun\\r\\n*READY*'
            zpty -w -n shell $'{line}\\t'
            zpty -m -r shell said '*{wanted}*' && print -r -- "$said"
        """
        ran = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert wanted in ran.stdout, (line, ran.stdout, ran.stderr)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_in_every_script(shell: str) -> None:
    text = script(shell)
    count = 0
    for command in described(build_parser()).walk():
        for option in command.options:
            for name in option.names:
                count += 1
                long = f"-l {name[2:]} " if name.startswith("--") else name[1:]
                assert (long if shell == "fish" else name) in text, name
        for name in command.commands:
            assert name in text
    assert count > 300
