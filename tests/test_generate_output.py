"""`manylora generate` passes over answers to the same rows, and touches no file that it has not written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from test_tools import ENGINE, refused, rows_of, run, write_rows

ROW = {"prompt_token_ids": [5, 40, 99], "max_tokens": 3, "ignore_eos": True, "temperature": 0}


def command(source: str, output: Path, *more: str) -> list[str]:
    return ["generate", *ENGINE, "-i", source, "-o", str(output), *more]


@pytest.mark.parametrize(
    ("row", "flags"),
    [
        (ROW | {"prompt_token_ids": [5, 40, 98]}, []),
        (ROW | {"adapter": "alpha"}, []),
        (ROW | {"max_tokens": 4}, []),
        (ROW, ["--temperature", "1"]),
    ],
)
def test_an_answer_to_another_row_is_never_passed_over(tmp_path: Path, row: dict[str, Any], flags: list[str]) -> None:
    output = tmp_path / "answers.jsonl"
    bare = {name: value for name, value in ROW.items() if name != "temperature"} if flags else ROW
    run(*command(write_rows(tmp_path / "in.jsonl", bare), output))
    kept = output.read_text()
    asked = {name: value for name, value in row.items() if name != "temperature"} if flags else row
    other = write_rows(tmp_path / "other.jsonl", asked)
    line = refused(*command(other, output, *flags))
    assert "has an answer to `0`, which is another row now" in line
    assert output.read_text() == kept
    assert "1 of 1 rows are answered already" in run(*command(str(tmp_path / "in.jsonl"), output)).stderr


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_a_base_that_is_wrong_leaves_no_file_and_loses_none(tmp_path: Path, flags: list[str]) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ROW), tmp_path / "answers.jsonl"
    wrong = ["generate", str(tmp_path / "no-base"), *ENGINE[1:], "-i", source, "-o", str(output), *flags]
    refused(*wrong)
    assert not output.exists()
    run(*command(source, output))
    kept = output.read_text()
    # Where all is answered no base is needed.
    if flags:
        refused(*wrong)
    else:
        assert "1 of 1 rows are answered already" in run(*wrong).stderr
    assert output.read_text() == kept
    run(*command(source, output, "--overwrite"))
    assert output.read_text().count("\n") == 1


def test_the_order_of_a_rows_fields_is_no_matter(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    run(*command(write_rows(tmp_path / "in.jsonl", ROW), output))
    turned = write_rows(tmp_path / "turned.jsonl", dict(reversed(ROW.items())))
    assert "1 of 1 rows are answered already" in run(*command(turned, output)).stderr


@pytest.mark.parametrize(
    "content",
    [
        "my notes",
        "my notes\n",
        '{"prompt": "x"}',
        '{"prompt": "x"}\n',
        '{"id": "q7", "prompt": "x"}',
        '{"id": "q7", "prompt": "x"}\n',
        '{"id": 0, "row": "0123456789abcdef", "text": "ours"}\nmy notes',
        "5",
        "\x00",
    ],
)
def test_a_file_that_it_has_not_written_stays(tmp_path: Path, content: str) -> None:
    output = tmp_path / "notes"
    output.write_text(content)
    line = refused(*command(write_rows(tmp_path / "in.jsonl", ROW), output))
    assert "give another file, or --overwrite" in line
    assert output.read_text() == content


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_the_input_is_no_output(tmp_path: Path, more: list[str]) -> None:
    source = write_rows(tmp_path / "in.jsonl", ROW)
    (tmp_path / "link.jsonl").symlink_to(source)
    for output in (source, tmp_path / "link.jsonl"):
        assert "is the input" in refused(*command(source, Path(output), *more))
    assert json.loads(Path(source).read_text()) == ROW


@pytest.mark.parametrize(
    "end", ["{", '{"i', '{"id": 0, "row": "01', '{"id": 0, "row": "0", "adapter": "base", "text": "x"}']
)
def test_a_line_that_was_not_finished_is_written_again(tmp_path: Path, end: str) -> None:
    output = tmp_path / "answers.jsonl"
    output.write_text(end)
    run(*command(write_rows(tmp_path / "in.jsonl", ROW), output))
    assert rows_of(output)[0]["usage"]["completion_tokens"] == 3
