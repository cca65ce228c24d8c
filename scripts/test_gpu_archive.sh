#!/usr/bin/env bash
# Tests the archive of `make gpu-archive` on a machine without a card: unpacked in a clean folder, everything on the emulated
# device, and the answer where there is no driver.
set -euo pipefail

archive=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
tar -C "$folder" -xzf "$archive"
cd "$folder"

# Nothing of the build may be needed: no variables, no tools beyond the system's.
clean=(env -i "PATH=/usr/bin:/bin" "HOME=$folder" "TMPDIR=$folder")
"${clean[@]}" OUT="$folder/results" manylora-gpu-check/gpu_check.sh --emulated --full
python3 - "$folder/results" << 'PYTHON'
import json, sys

read = lambda name: json.load(open(f"{sys.argv[1]}/{name}"))
summary, kernels, card = read("summary.json"), read("kernels.json"), read("card.json")
passed = {part["part"] for part in summary["parts"] if part["outcome"] == "pass"}
needed = {"kernel parity", "device functions", "driver layer", "backend", "tiny models against the oracle", "wheel",
          "bench table", "7B shape"}
assert summary["failures"] == 0 and summary["emulated"] and needed <= passed, (needed - passed, summary)
cases = kernels["cases"]
assert "emulated" in kernels["card"] and {case["caches"] for case in cases} == {"warm", "flushed"}
assert {case["popularity"] for case in cases} == {None, "identical", "uniform", "skewed", "distinct"}
assert all(case["device"] == "cuda" and case["microseconds"] > 0 and case["fraction_of_limit"] > 0 for case in cases)
assert {case["case"] for case in card["cases"]} == {"ledger", "decode", "prefill", "cold load"}
print(f"{len(cases)} rows in the bench table, {len(card['cases'])} of the engine")
PYTHON

# A card is offered to this script on machines that have one; there it must not be hidden.
if ldconfig -p 2> /dev/null | grep -q 'libcuda\.so'; then
    echo "this machine has a driver: what is said without one is not tested"
    exit 0
fi
status=0
said=$("${clean[@]}" OUT="$folder/without" manylora-gpu-check/gpu_check.sh) || status=$?
if [ "$status" != 2 ] || ! grep -q 'no card that can be used' <<< "$said"; then
    echo "without a driver the script ended with $status: $said" >&2
    exit 1
fi
grep 'no card' <<< "$said"
