"""Prints what the machine can do at most, by ManyLoRA's own yardstick: bandwidth from huge pages, and the arithmetic
peak of the instruction that bf16 products are made of. Run with the interpreter that has ManyLoRA installed."""

import json
import sys

from manylora import _core

# Of each measurement.
SECONDS = 0.5

if __name__ == "__main__":
    threads = int(sys.argv[1])
    print(
        json.dumps(
            {"bandwidth": _core.read_bandwidth(threads, SECONDS), "peak": _core.arithmetic_peak(threads, SECONDS)}
        )
    )
