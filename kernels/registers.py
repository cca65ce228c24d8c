"""Gates what the kernels cost a multiprocessor: registers, shared memory and spills, from what ptxas said.

`make registers` fails if a kernel spills, if one is missing from registers.txt, or if one needs more or fewer registers
or bytes of shared memory than that table says: such a change is either wanted, and then committed with the table
(`make registers-write`), or found out here. Registers differ between releases of ptxas, so the numbers are compared
only with the release that the table names; spills fail with any.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Cost(NamedTuple):
    """What one kernel needs on one architecture."""

    registers: int
    shared: int
    spilled: int


ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")


def read_report(text: str) -> dict[tuple[str, int], Cost]:
    """Costs by (kernel, architecture) from the output of `ptxas -v`."""
    costs: dict[tuple[str, int], Cost] = {}
    entry: tuple[str, int] | None = None
    spilled = 0
    for line in text.splitlines():
        if match := ENTRY.search(line):
            entry, spilled = (match[1], int(match[2])), 0
        elif match := SPILLS.search(line):
            spilled = int(match[1]) + int(match[2])
        elif (match := USED.search(line)) and entry is not None:
            costs[entry] = Cost(int(match[1]), int(match[2] or 0), spilled)
            entry = None
    return costs


def table(costs: dict[tuple[str, int], Cost], release: str) -> str:
    """Write the table as it is committed: one line for each kernel, registers for each architecture."""
    architectures = sorted({architecture for _, architecture in costs})
    lines = [
        "# Registers of a thread on each architecture and bytes of static shared memory of a block; nothing spills.",
        f"# Made by `make registers-write` with ptxas {release}.",
        f"{'kernel':<32}" + "".join(f"{f'sm_{architecture}':>8}" for architecture in architectures) + f"{'shared':>8}",
    ]
    for kernel in sorted({kernel for kernel, _ in costs}):
        of_kernel = [costs.get((kernel, architecture)) for architecture in architectures]
        shared = max(cost.shared for cost in of_kernel if cost)
        numbers = "".join(f"{cost.registers if cost else '-':>8}" for cost in of_kernel)
        lines.append(f"{kernel:<32}{numbers}{shared:>8}")
    return "\n".join(lines) + "\n"


def read_table(text: str) -> dict[tuple[str, int], tuple[int, int]]:
    """Read (registers, shared) by (kernel, architecture) from a committed table."""
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    architectures = [int(name.removeprefix("sm_")) for name in rows[0][1:-1]]
    return {
        (kernel, architecture): (int(number), int(shared))
        for kernel, *numbers, shared in rows[1:]
        for architecture, number in zip(architectures, numbers, strict=True)
    }


def differences(costs: dict[tuple[str, int], Cost], text: str, release: str) -> list[str]:
    """List what a check has to say against these costs."""
    problems = [
        f"`{kernel}` spills {cost.spilled} bytes on sm_{architecture}"
        for (kernel, architecture), cost in costs.items()
        if cost.spilled
    ]
    wanted = read_table(text)
    same_release = f"ptxas {release}." in text
    if not same_release:
        print(f"registers.txt was made by another ptxas than {release}: only spills are checked")
    for (kernel, architecture), cost in costs.items():
        want = wanted.get((kernel, architecture))
        if want is None:
            problems.append(f"`{kernel}` for sm_{architecture} is not in registers.txt")
        elif same_release and want != (cost.registers, cost.shared):
            problems.append(
                f"`{kernel}` on sm_{architecture} needs {cost.registers} registers and {cost.shared} bytes; "
                f"registers.txt says {want[0]} and {want[1]}"
            )
    gone = {kernel for kernel, _ in wanted} - {kernel for kernel, _ in costs}
    problems += [f"`{kernel}` is in registers.txt and nowhere else" for kernel in sorted(gone)]
    return problems


def main() -> int:
    """Check the table or write it, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", type=Path, metavar="TABLE")
    action.add_argument("--write", type=Path, metavar="TABLE")
    parser.add_argument("--nvcc", required=True, help="whose release the table is for")
    parser.add_argument("reports", nargs="+", type=Path, help="outputs of ptxas -v")
    arguments = parser.parse_args()
    costs: dict[tuple[str, int], Cost] = {}
    for report in arguments.reports:
        costs |= read_report(report.read_text())
    version = subprocess.run([arguments.nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"V(\d+\.\d+\.\d+)", version)
    release = match[1] if match else "unknown"
    if not costs:
        print("ptxas reported no kernel: were the images made with -Xptxas -v?", file=sys.stderr)
        return 1
    if arguments.write:
        arguments.write.write_text(table(costs, release))
        return 0
    problems = differences(costs, arguments.check.read_text(), release)
    for problem in problems:
        print(problem, file=sys.stderr)
    kernels = len({kernel for kernel, _ in costs})
    print(f"{kernels} kernels on {len({a for _, a in costs})} architectures: {len(problems)} differences")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
