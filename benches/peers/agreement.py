"""Do the engines compute the same? Greedy tokens against those of PEFT in f32."""

from typing import Any

import worker

# Difference of the two best logits, in parts of the largest, below which rounding may choose either.
TIE = 1e-4
# Of engines whose files are half as wide: they round what they multiply.
ROUNDED_TIE = 1e-2


def compare(reference: dict[str, Any], rows: list[list[int]], tie: float) -> dict[str, int]:
    """Compare each row up to its first difference, which must be where two tokens tie."""
    counts = {"equal": 0, "ties": 0, "different": 0, "unreadable": 0}
    for expected, margins, row in zip(reference["tokens"], reference["margins"], rows, strict=True):
        for wanted, margin, found in zip(expected, margins, row, strict=True):
            if wanted == found:
                counts["equal"] += 1
                continue
            outcome = "unreadable" if found == worker.UNREADABLE else "ties" if margin < tie else "different"
            counts[outcome] += 1
            break
    return counts


def adapters_matter(reference: dict[str, Any]) -> list[str]:
    """Of cases with adapters, those in which a row's tokens are the base's: nothing could be told from them."""
    base = next(value["tokens"] for name, value in reference.items() if "base" in name)
    return [
        name
        for name, value in reference.items()
        if "base" not in name and any(row == plain for row, plain in zip(value["tokens"], base, strict=True))
    ]


def judge(reports: dict[str, dict[str, Any]], ties: dict[str, float]) -> tuple[dict[str, Any], bool]:
    """Compare every engine's report with PEFT's, say it, and return the counts and whether all is well."""
    reference, outcome, well = reports["peft"], {}, True
    for name in adapters_matter(reference):
        print(f"WARNING: `{name}`: adapters change nothing in a row, so this compares little")
        well = False
    for engine, report in reports.items():
        if engine == "peft":
            continue
        outcome[engine] = {
            name: compare(reference[name], values["tokens"], ties[engine]) for name, values in report.items()
        }
        for name, counts in outcome[engine].items():
            unreadable = f", {counts['unreadable']} in a token that it does not show" if counts["unreadable"] else ""
            print(
                f"{engine}, {name}: {counts['equal']} tokens as PEFT's, {counts['ties']} rows end in a tie{unreadable}"
            )
            if counts["different"]:
                print(f"WARNING: {engine} differs from PEFT in {counts['different']} rows of `{name}` beyond a tie")
                well = False
    return outcome, well
