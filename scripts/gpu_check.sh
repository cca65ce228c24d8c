#!/usr/bin/env bash
# Checks ManyLoRA on the first NVIDIA card of this machine, from the archive that `make gpu-archive` makes: no network,
# compiler or CUDA toolkit is needed. Each part has its time limit and a line that says PASS, FAIL or skipped; what comes after
# a failure is run all the same.
#
#   ./gpu_check.sh [--full] [--emulated]
#
#   --full      after the core of five minutes: a 7B model's shape with adapters (20 GB of disk, 24 GB of card memory)
#   --emulated  the same programs on the emulated device of the archive, at small sizes: whether the archive is whole
#
#   OUT=folder    where summary.json, bench results and logs go (default ./gpu-check-results)
#   WORK=folder   where --full writes its random weights (default $TMPDIR/manylora-gpu-check, kept for the next time)
#   MODEL=folder  a real model, as SmolLM2-135M, for --full: greedy tokens on the card and on the processor
#
# Exit code: 0 all passed, 1 something failed, 2 there is no card that can be used.
set -uo pipefail

full=0 emulated=0
for argument in "$@"; do
    case $argument in
        --full) full=1 ;;
        --emulated) emulated=1 ;;
        -h | --help) sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "unknown argument \`$argument\`; see --help" >&2; exit 1 ;;
    esac
done

here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$PWD/gpu-check-results}
mkdir -p "$out/logs" && out=$(cd "$out" && pwd) || exit 1
[ -x "$here/bin/kernels" ] || { echo "$here has no \`bin/kernels\`: this script runs from the archive of \`make gpu-archive\`" >&2; exit 1; }
log=$out/gpu-check.log
: > "$log"
results=() failures=0

say() { printf '%s\n' "$*" | tee -a "$log"; }

# A string as JSON has it.
quoted() { local text=${1//\\/\\\\}; text=${text//\"/\\\"}; printf '"%s"' "${text//[[:cntrl:]]/ }"; }

record() { # part, outcome, seconds, detail
    results+=("    {\"part\": $(quoted "$1"), \"outcome\": \"$2\", \"seconds\": $3, \"detail\": $(quoted "$4")}")
}

skip() { say "skipped  $1: $2"; record "$1" skipped 0 "$2"; }

# A part: its name, its time limit in seconds, and the command. The last line of what it says is shown.
part() {
    local name=$1 limit=$2 file="$out/logs/${1// /-}.log" start=$SECONDS status=0 detail
    shift 2
    timeout -k 10 "$limit" "$@" > "$file" 2>&1 || status=$?
    { echo "== $name: $*"; cat "$file"; } >> "$log"
    detail=$(grep -v '^ *$' "$file" | tail -n 1 | cut -c -200)
    [ "$status" = 124 ] && detail="no end after $limit s; $detail"
    if [ "$status" = 0 ]; then
        say "PASS     $name ($((SECONDS - start)) s): $detail"
        record "$name" pass $((SECONDS - start)) "$detail"
    else
        failures=$((failures + 1))
        say "FAIL     $name ($((SECONDS - start)) s, exit code $status): $detail"
        grep -E 'FAIL|panicked' "$file" | head -n 10 | sed 's/^/         /' | tee -a "$log"
        record "$name" fail $((SECONDS - start)) "$detail"
    fi
}

# cuBLASLt of a Python package, where the system's loader has none.
find_blas() {
    [ -n "${MANYLORA_CUBLASLT_LIBRARY:-}" ] && return
    ldconfig -p 2> /dev/null | grep -q 'libcublasLt\.so' && return
    local found
    found=$(python3 - 2> /dev/null << 'PYTHON'
import glob, os, site, sysconfig
folders = [sysconfig.get_paths()["purelib"], site.getusersitepackages(), *site.getsitepackages()]
for folder in folders:
    for found in glob.glob(os.path.join(folder, "nvidia", "*", "lib", "libcublasLt.so.1[23]")):
        print(found)
PYTHON
    )
    found=${found%%$'\n'*}
    [ -z "$found" ] || export MANYLORA_CUBLASLT_LIBRARY=$found
}

export MANYLORA_ORACLE_FOLDER=$here/oracle MANYLORA_TEST_LOGS=$out/logs
# Stopped at the first failure or not, a test tells where it was.
export RUST_BACKTRACE=${RUST_BACKTRACE:-0}
if [ "$emulated" = 1 ]; then
    device=$here/emulated
    export MANYLORA_EMULATOR_FOLDER=$device MANYLORA_REQUIRE_EMULATOR=1
    on_device=(env "MANYLORA_CUDA_LIBRARY=$device/libcuda.so" "MANYLORA_CUBLASLT_LIBRARY=$device/libcublasLt.so" EMU_SCHEDULE=eager)
    parity=(env "LIBCUDA=$device/libcuda.so")
    driver=(cuda_driver '::deferred') backend=(cuda_backend '::deferred') models=(cuda_logits '::qwen2')
    sizes=(--shape 64x96 --rank 8 --rows 1 --rows 5 --rounds 1)
    whole=(--shape tiny --tokens 3 --rounds 1 --streams 1 --streams 8)
else
    export MANYLORA_CARD=1
    find_blas
    on_device=(env) parity=(env "KERNELS=$here/kernels")
    driver=(cuda_driver) backend=(cuda_backend) models=(cuda_logits)
    # Both ends of what models have, in the time that there is.
    sizes=(--shape 896x4864 --shape 4096x14336 --rank 16 --rank 64 --rows 1 --rows 8 --rows 64 --rounds 5)
    whole=(--shape 7b)
fi

say "ManyLoRA $(tr '\n' ' ' < "$here/version.txt" 2> /dev/null), $(uname -sm), glibc $(getconf GNU_LIBC_VERSION 2> /dev/null)"
if [ "$emulated" = 0 ] && command -v nvidia-smi > /dev/null; then
    say "$(nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,mig.mode.current --format=csv 2>&1)"
fi
if ! card=$("${on_device[@]}" "$here/bin/kernels" --device cuda --describe 2>&1); then
    say "no card that can be used: $card"
    printf '{\n  "card": null, "reason": %s\n}\n' "$(quoted "$card")" > "$out/summary.json"
    exit 2
fi
say "$card"

part 'kernel parity' 90 "${parity[@]}" "$here/bin/kernel-tests" attention lora rows matmul
part 'device functions' 30 "${parity[@]}" "$here/bin/kernel-tests" device
part 'driver layer' 60 "$here/bin/${driver[0]}" "${driver[@]:1}"
part 'backend' 90 "$here/bin/${backend[0]}" "${backend[@]:1}"
part 'tiny models against the oracle' 120 "$here/bin/${models[0]}" "${models[@]:1}"
grep -h 'skipped:' "$out/logs/driver-layer.log" "$out/logs/backend.log" "$out/logs/tiny-models-against-the-oracle.log" 2> /dev/null |
    sed 's/^test /skipped  /; s/ \.\.\. skipped: /: /' | tee -a "$log"

if ! command -v python3 > /dev/null; then
    skip 'wheel' 'there is no python3'
else
    site=$(mktemp -d)
    # Only the part in Rust, which needs no other package.
    part 'wheel' 60 python3 -c '
import glob, importlib.util, sys, zipfile
wheel, folder = glob.glob(sys.argv[1] + "/*.whl")[0], sys.argv[2]
zipfile.ZipFile(wheel).extractall(folder)
path = glob.glob(folder + "/manylora/_core*.so")[0]
spec = importlib.util.spec_from_file_location("manylora._core", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print("imported", wheel.rsplit("/", 1)[-1], "by Python", sys.version.split()[0])
' "$here/wheel" "$site"
    rm -rf "$site"
fi

part 'bench table' 180 "${on_device[@]}" "$here/bin/kernels" --device cuda --json "$out/kernels.json" "${sizes[@]}"
grep -h '^cuda' "$out/logs/bench-table.log" | tee -a "$log"

if [ "$full" = 1 ]; then
    work=${WORK:-${TMPDIR:-/tmp}/manylora-gpu-check}
    mkdir -p "$work"
    free=$(df -Pk "$work" | awk 'NR == 2 { print int($4 / 1048576) }')
    needed=24
    [ "$emulated" = 1 ] && needed=1
    if [ "$free" -lt "$needed" ] && [ ! -e "$work/7b/config.json" ]; then
        skip '7B shape' "$work has $free GiB free and $needed are needed; set WORK"
    else
        model=()
        [ -n "${MODEL:-}" ] && model=(--model "$MODEL")
        part '7B shape' 1800 "${on_device[@]}" "$here/bin/card" --folder "$work" --json "$out/card.json" "${whole[@]}" ${model[@]+"${model[@]}"}
        grep -hE '^(ledger|decode|prefill|cold load|.*greedy tokens)' "$out/logs/7B-shape.log" | tee -a "$log"
    fi
    [ -n "${MODEL:-}" ] || skip 'real model' 'MODEL names no folder'
    if [ "$emulated" = 1 ]; then
        skip 'compute-sanitizer' 'it needs a card'
    elif command -v compute-sanitizer > /dev/null; then
        for tool in memcheck racecheck synccheck; do
            part "compute-sanitizer $tool" 600 "${parity[@]}" compute-sanitizer --tool "$tool" --error-exitcode 9 "$here/bin/kernel-tests" device lora matmul
        done
    else
        skip 'compute-sanitizer' 'it is not there'
    fi
    if python3 -c 'import vllm' 2> /dev/null; then
        skip 'vLLM side by side' "it is there, and has to be run by hand on the weights in $work"
    else
        skip 'vLLM side by side' 'it is not there'
    fi
else
    skip '7B shape, real model, compute-sanitizer, vLLM' 'only with --full'
fi

{
    printf '{\n  "version": %s,\n  "card": %s,\n  "emulated": %s,\n  "failures": %d,\n  "seconds": %d,\n  "parts": [\n' \
        "$(quoted "$(cat "$here/version.txt" 2> /dev/null)")" "$(quoted "$card")" "$([ "$emulated" = 1 ] && echo true || echo false)" "$failures" "$SECONDS"
    printf '%s\n' "${results[@]}" | sed '$!s/$/,/'
    printf '  ]\n}\n'
} > "$out/summary.json"
say "$failures failures in $SECONDS s; results in $out"
[ "$failures" = 0 ]
