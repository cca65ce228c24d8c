"""docs/errors.md against the code: whatever a user can be told is on the page, and nothing that is gone."""

from __future__ import annotations

import re
from http import HTTPStatus
from pathlib import Path

import pytest

from manylora import exceptions

ROOT = Path(__file__).parents[1]
CRATES = ROOT / "crates"
PAGE = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
# Enums without messages of their own, whose variants are told nevertheless.
KINDS = {"RefusalKind": "manylora-model/src/error.rs", "LoadFault": "manylora-core/src/event.rs"}


def status_of(name: str) -> int:
    # Python 3.13 has renamed the one, http has not.
    return 413 if name == "PAYLOAD_TOO_LARGE" else HTTPStatus[name].value


def source(path: str) -> str:
    return (CRATES / path).read_text(encoding="utf-8")


def error_enums() -> dict[str, str]:
    """Return the file of each public enum that is an error."""
    found = {}
    for path in sorted(CRATES.glob("*/src/**/*.rs")):
        for name in re.findall(
            r"^#\[derive\([^)]*thiserror::Error\)\]\npub enum (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            found[name] = path.relative_to(CRATES).as_posix()
    return found


def body(name: str, text: str) -> str:
    found = re.search(rf"^pub enum {name} \{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


def literal(attribute: str) -> str:
    """Return the longest run of a message that has no value in it, as the page writes it."""
    texts = re.findall(r'"((?:[^"\\]|\\.)*)"', attribute, re.DOTALL)
    if not texts:
        return ""
    text = re.sub(r"\\\n\s*", "", texts[0]).replace('\\"', '"').replace("`", "")
    return max((run.strip() for run in re.split(r"\{[^}]*\}", text)), key=len)


def variants(name: str, path: str) -> list[tuple[str, str]]:
    """Return each variant of an enum of errors with what its message must have."""
    inside = body(name, source(path))
    messages = re.findall(r"^    #\[error\((.*?)\)\]\n    (\w+)", inside, re.MULTILINE | re.DOTALL)
    all_of_them = re.findall(r"^    ([A-Z]\w*)", inside, re.MULTILINE)
    assert [variant for _, variant in messages] == all_of_them, f"{name} has variants without a message"
    return [(variant, literal(attribute)) for attribute, variant in messages]


ENUMS = error_enums()
VARIANTS = [(name, *variant) for name, path in ENUMS.items() for variant in variants(name, path)]


def row(first: str) -> list[str]:
    """Return the cells of the one row that begins with this."""
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{first}` |")]
    assert len(rows) == 1, f"docs/errors.md has {len(rows)} rows for `{first}`, and must have one"
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", rows[0])[1:-1]]


def test_the_enums_are_found() -> None:
    assert {"EngineError", "ModelError", "FailureReason", "KernelError", "CudaError", "ServerError"} <= ENUMS.keys()
    assert len(VARIANTS) > 60


@pytest.mark.parametrize(
    ("name", "variant", "said"), VARIANTS, ids=[f"{name}::{variant}" for name, variant, _ in VARIANTS]
)
def test_each_error_is_on_the_page_with_its_message(name: str, variant: str, said: str) -> None:
    cells = row(f"{name}::{variant}")
    assert said in cells[1], f"`{name}::{variant}` says `{said}`"
    assert all(cells[-2:]), f"`{name}::{variant}` lacks why, or what to do"


def test_no_error_on_the_page_is_gone() -> None:
    there = {f"{name}::{variant}" for name, variant, _ in VARIANTS}
    for name, path in KINDS.items():
        kinds = re.findall(r"^    ([A-Z]\w*),$", body(name, source(path)), re.MULTILINE)
        assert len(kinds) == 4
        for kind in kinds:
            assert f"`{name}::{kind}`" in PAGE
            there.add(f"{name}::{kind}")
    assert set(re.findall(r"`(\w+::\w+)`", PAGE)) == there


def test_each_exception_is_the_one_that_is_raised() -> None:
    text = source("manylora-py/src/errors.rs").split("fn to_python", 1)[1].split("\n}\n", 1)[0]
    arms = re.findall(r"((?:EngineError::\w+[^=]*?)+)=>\s*(.*?)(?=\n        (?:EngineError|//)|\Z)", text, re.DOTALL)
    seen = set()
    for patterns, answer in arms:
        raised = re.findall(r'raise\(py, "(\w+)"', answer)
        kinds = re.findall(r'"(conflict|operation|timeout)"', answer)
        expected = {"conflict": "AdapterConflictError", "operation": "AdapterError", "timeout": "AdapterTimeoutError"}
        names = [expected[kinds[0]]] if kinds else [name for name in raised if name != "refused"] or ["AdapterError"]
        for variant in re.findall(r"EngineError::(\w+)", patterns):
            seen.add(variant)
            assert f"`{names[0]}`" in row(f"EngineError::{variant}")[3], (variant, names)
    assert seen == {variant for name, variant, _ in VARIANTS if name == "EngineError"}


def test_each_exception_of_python_is_on_the_page() -> None:
    classes = [
        one for one in vars(exceptions).values() if isinstance(one, type) and issubclass(one, exceptions.ManyLoRAError)
    ]
    assert len(classes) >= 12
    for one in classes:
        cells = row(one.__name__)
        bases = [base.__name__ for base in one.__bases__ if base not in (exceptions.ManyLoRAError, Exception)]
        assert re.findall(r"\w+", cells[1]) == bases, one
    for kind in re.findall(r"`(\w+)`", (exceptions.AdapterError.__doc__ or "").split("kind:")[1]):
        assert f"`{kind}`" in PAGE.split("`AdapterError.kind` is")[1].split("\n")[0]


def test_each_status_is_on_the_page() -> None:
    made = re.findall(r'Self::new\(StatusCode::(\w+), "(\w+)"', source("manylora-server/src/error.rs"))
    assert len(made) >= 12
    for status, kind in made:
        assert f"\n| {status_of(status)} | `{kind}` |" in PAGE, (status, kind)


def test_each_status_is_the_one_that_is_answered() -> None:
    text = source("manylora-server/src/error.rs")
    statuses = {
        name: status_of(status)
        for name, status in re.findall(r"fn (\w+)\([^{]*\{\s*(?:let error = )?Self::new\(StatusCode::(\w+)", text)
    }
    arms = text.split("impl From<EngineError> for ApiError", 1)[1].split("\n}\n", 1)[0]
    found = re.findall(
        r"((?:\|?\s*EngineError::\w+[^=]*?)+)=>(.*?)(?=\n            (?:\| )?(?:EngineError|//)|\Z)", arms, re.DOTALL
    )
    seen = set()
    for patterns, answer in found:
        told = [statuses[name] for name in re.findall(r"Self::(\w+)\(", answer) if name in statuses]
        told += [status_of(status) for status in re.findall(r"Self::new\(StatusCode::(\w+)", answer)]
        assert told, answer
        for variant in re.findall(r"EngineError::(\w+)", patterns):
            failure = re.search(rf"{variant}\(FailureReason::(\w+)", patterns)
            cell = row(f"FailureReason::{failure[1]}" if failure else f"EngineError::{variant}")[2]
            seen.add(variant)
            if variant != "RequestFailed" and not cell.startswith("by "):
                assert set(re.findall(r"\d{3}", cell)) >= {str(status) for status in told}, (variant, told)
            elif failure or "RefusalKind" in answer:
                assert len(told) == 4
                assert all(str(status) in PAGE for status in told)
    assert seen == {variant for name, variant, _ in VARIANTS if name == "EngineError"}


def test_each_reason_of_a_rejection_is_on_the_page() -> None:
    text = source("manylora-server/src/metrics/mod.rs")
    reasons = re.findall(r'"(\w+)"', text.split("const REJECTIONS", 1)[1].split("];", 1)[0])
    assert len(reasons) == len(
        re.findall(r"^    [A-Z]\w*,$", text.split("enum Rejection {", 1)[1].split("}", 1)[0], re.M)
    )
    for reason in reasons:
        assert row(reason)[1] in ("429", "503")


def test_each_key_that_is_refused_is_on_the_page() -> None:
    text = source("manylora-model/src/adapter/features.rs")
    changing = re.findall(r'changing\(\s*"(\w+)",\s*AdapterFeature::\w+,\s*"((?:[^"\\]|\\.)*)"', text)
    assert len(changing) == text.count("    changing(") >= 15
    for key, message in changing:
        assert message in row(key)[1]
    for said in re.findall(r'^            let message = format!\("([^{"]+)', text, re.MULTILINE):
        assert said.strip() in PAGE
