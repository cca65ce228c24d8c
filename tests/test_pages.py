"""What the documentation shows is run as it stands, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from pages import Page, blocks

ROOT = Path(__file__).parents[1]
RUN = [
    "docs/plan.md",
    "docs/tutorial.md",
    *(f"docs/migrate/{name}.md" for name in ("llamacpp", "lorax", "peft", "sglang", "vllm")),
]
ALL = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("name", RUN)
def test_a_page_does_what_it_says(name: str, tmp_path: Path) -> None:
    if "MANYLORA_SMOLLM2" not in os.environ and "MANYLORA_REQUIRE_DATA" not in os.environ:
        pytest.skip("set MANYLORA_SMOLLM2, or run `make test`")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert Page(ROOT / name, tmp_path, {"PATH": path}).run() >= 1


def test_blocks_are_told_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`greeting.txt`:\n\n```text\nhello\n```\n\n```sh\ncat greeting.txt\necho and more\n```\n\n"
        "```text\nhe...\nmore\n```\n<!-- not run: no docker -->\n```sh\nfalse\n```\n```text\nanything\n```\n"
        "```python\nprint(1 + 1)\n```\n```text\n2\n```\n"
    )
    assert [(block.language, block.file, block.not_run) for block in blocks(page.read_text())] == [
        ("text", "greeting.txt", None), ("sh", None, None), ("text", None, None), ("sh", None, "no docker"),
        ("text", None, None), ("python", None, None), ("text", None, None),
    ]  # fmt: skip
    assert Page(page, tmp_path, {}).run() == 2
    for wrong in ("```sh\nfalse | true\n```\n", "```sh\necho one\n```\n```text\ntwo\n```\n", "```cobol\nx\n```\n"):
        page.write_text(wrong)
        with pytest.raises(AssertionError):
            Page(page, tmp_path, {}).run()


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", ALL)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name} names {target}"
        if anchor:
            assert anchor in anchors(found), f"{name} names {target}"
