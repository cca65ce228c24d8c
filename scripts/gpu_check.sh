#!/usr/bin/env bash
# Checks ManyLoRA on the first NVIDIA card of this machine, from the archive that `make gpu-archive` makes: no network,
# compiler or CUDA toolkit is needed, but a driver for CUDA 13 (580 or newer) and a card of compute capability 8.0 or newer. Each part has its time limit and a line that says PASS, FAIL or skipped; what comes after
# a failure is run all the same. Ctrl-C ends it at once and keeps what was found until then.
#
#   ./gpu_check.sh [--full] [--emulated] [--only WORDS]
#
#   --full      after the core of five minutes: a 7B model's shape with adapters (22 GB of disk, 24 GB of card memory), vLLM
#               on the same, a real model, compute-sanitizer, as far as they are there
#   --emulated  the same programs on the emulated device of the archive, at small sizes: whether the archive is whole
#   --only      the parts whose names contain these words (`--full --only vLLM` goes on with the card.json that is in OUT)
#
#   OUT=folder    where summary.json, bench results and logs go (default ./gpu-check-results)
#   WORK=folder   where --full writes its random weights (default $TMPDIR/manylora-gpu-check, kept for the next time)
#   CORE=seconds  what the core may take in all (default 300; with --emulated 3000): a part gets what is left of it at most, and
#                 what was not reached is named, and counts as failed
#   MODEL=folder  a real model, as SmolLM2-135M, for --full: greedy tokens on the card and on the processor
#   CUDA_VISIBLE_DEVICES=...  another card than the first, or an instance of one that is divided (MIG)
#
# Exit code: 0 all passed, 1 something failed, 2 there is no card that can be used, 3 nothing can be checked here (an unknown
# argument, another kind of machine, no place for results), 130 stopped.
set -uo pipefail

readonly NO_CARD=2 NO_CHECK=3 STOPPED=130

refuse() { printf '%s\n' "$*" >&2; exit "$NO_CHECK"; }

full=0 emulated=0 only=''
while [ $# -gt 0 ]; do
    case $1 in
        --full) full=1 ;;
        --emulated) emulated=1 ;;
        --only) only=${2:-}; shift; [ -n "$only" ] || refuse "\`--only\` needs words of a part's name" ;;
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) refuse "unknown argument \`$1\`; see --help" ;;
    esac
    shift
done

here=$(cd "$(dirname "$0")" && pwd)
[ -x "$here/bin/kernels" ] || refuse "$here has no \`bin/kernels\`: this script runs from the archive of \`make gpu-archive\`, unpacked where programs may run"
[ "$(uname -sm)" = 'Linux x86_64' ] || refuse "this archive is for Linux on x86_64, and this is $(uname -sm)"
glibc=$(sed -n 's/^glibc //p' "$here/version.txt")
has=$(getconf GNU_LIBC_VERSION 2> /dev/null) || has='no glibc'
[ "$(printf '%s\n' "$glibc" "${has#glibc }" | sort -V | head -n 1)" = "$glibc" ] || refuse "these programs need glibc $glibc or newer, and here is $has"
out=${OUT:-$PWD/gpu-check-results}
log=$out/gpu-check.log
{ mkdir -p "$out/logs" && out=$(cd "$out" && pwd) && log=$out/gpu-check.log && : > "$log" && scratch=$(mktemp -d "$out/scratch.XXXXXX"); } ||
    refuse "results cannot be written to $out; set OUT"
trap 'rm -rf "$scratch"' EXIT
card='' running='' results=() failures=0

say() { printf '%s\n' "$*" | tee -a "$log"; }

# Until when the core has to be done, in seconds of this script; none after it.
core=${CORE:-$([ "$emulated" = 1 ] && echo 3000 || echo 300)}
[[ $core =~ ^[1-9][0-9]{0,5}$ ]] || refuse "CORE is \`$core\`, and seconds are needed"
deadline=$core

# A string as JSON has it.
quoted() { local text=${1//\\/\\\\}; text=${text//\"/\\\"}; printf '"%s"' "${text//[[:cntrl:]]/ }"; }

record() { # part, outcome, seconds, detail
    results+=("    {\"part\": $(quoted "$1"), \"outcome\": \"$2\", \"seconds\": $3, \"detail\": $(quoted "$4")}")
}

summary() { # whether it came to its end
    {
        printf '{\n  "version": %s,\n  "card": %s,\n  "emulated": %s,\n  "complete": %s,\n  "failures": %d,\n  "seconds": %d,\n  "parts": [\n' \
            "$(quoted "$(cat "$here/version.txt")")" "$(quoted "$card")" "$([ "$emulated" = 1 ] && echo true || echo false)" "$1" "$failures" "$SECONDS"
        [ "${#results[@]}" = 0 ] || printf '%s\n' "${results[@]}" | sed '$!s/$/,/'
        printf '  ]\n}\n'
    } > "$out/summary.json" || { say "summary.json could not be written to $out"; return 1; }
}

# A command with a time limit in seconds. It runs beside this script, which can be stopped so, and with it the command.
limited() {
    local status=0
    timeout -k 10 "$@" 3>&- &
    running=$!
    wait "$running" || status=$?
    running=
    return "$status"
}

# Wherever output goes when this script is stopped, the last words go to where it began.
exec 3>&1
stopped() {
    trap '' INT TERM HUP
    exec >&3
    if [ -n "$running" ]; then
        kill "$running" 2> /dev/null
        wait "$running" 2> /dev/null
    fi
    summary false
    say "stopped after $SECONDS s, with $failures failures until then; results in $out"
    exit "$STOPPED"
}
trap stopped INT TERM HUP

wanted() { [[ $1 == *"$only"* ]]; }

skip() { wanted "$1" || return 0; say "skipped  $1: $2"; record "$1" skipped 0 "$2"; }

# Runs a part's command, all that it says into its log; the last line of it becomes the part's detail.
run_part() { # name, limit in seconds, command
    local name=$1 limit=$2 status=0
    # An emulated device is as fast as the machine has cores to spare.
    [ "$emulated" = 0 ] || limit=$((10 * limit))
    [ -z "$deadline" ] || [ $((deadline - SECONDS)) -ge "$limit" ] || limit=$((deadline - SECONDS))
    file="$out/logs/${name// /-}.log" start=$SECONDS
    shift 2
    limited "$limit" "$@" > "$file" 2>&1 || status=$?
    { echo "== $name: $*"; cat "$file"; } >> "$log"
    detail=$(grep -v '^ *$' "$file" | tail -n 1 | cut -c -300)
    [ $((SECONDS - start)) -lt "$limit" ] || detail="no end after $limit s; $detail"
    return "$status"
}

part() { # name, limit in seconds, command
    local status=0 file start detail
    wanted "$1" || return 0
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
        failures=$((failures + 1))
        say "FAIL     $1: not reached, since the core's $core s are over"
        record "$1" 'not reached' 0 "the core's $core s are over"
        return 1
    fi
    run_part "$@" || status=$?
    if [ "$status" = 0 ]; then
        say "PASS     $1 ($((SECONDS - start)) s): $detail"
        record "$1" pass $((SECONDS - start)) "$detail"
    else
        failures=$((failures + 1))
        say "FAIL     $1 ($((SECONDS - start)) s, exit code $status): $detail"
        grep -E 'FAIL|panicked' "$file" | head -n 10 | sed 's/^/         /' | tee -a "$log"
        record "$1" fail $((SECONDS - start)) "$detail"
    fi
    return "$status"
}

# A part that tells of others than ManyLoRA, or that may take longer than anybody waits: what becomes of it is no failure.
attempt() { # name, limit in seconds, exit code that is a failure all the same or -, command
    local name=$1 limit=$2 failing=$3 status=0 file start detail
    wanted "$name" || return 0
    shift 3
    run_part "$name" "$limit" "$@" || status=$?
    case $status in
        0) say "PASS     $name ($((SECONDS - start)) s): $detail"; record "$name" pass $((SECONDS - start)) "$detail" ;;
        "$failing")
            failures=$((failures + 1))
            say "FAIL     $name ($((SECONDS - start)) s): $detail"
            record "$name" fail $((SECONDS - start)) "$detail"
            ;;
        *) skip "$name" "it ended with exit code $status: $detail (see $file)" ;;
    esac
    return "$status"
}

# Lines of a part's log that people want to see.
show() { # name, pattern
    ! wanted "$1" || grep -hE "$2" "$out/logs/${1// /-}.log" 2> /dev/null | tee -a "$log"
}

has_python() { # what it must be able to do
    command -v python3 > /dev/null && limited 120 python3 -c "$1" > /dev/null 2>&1
}

# cuBLASLt of a toolkit or of a Python package, where the system's loader has none.
find_blas() {
    [ -z "${MANYLORA_CUBLASLT_LIBRARY:-}" ] || return 0
    ! ldconfig -p 2> /dev/null | grep -qE 'libcublasLt\.so(\.1[23])? ' || return 0
    local found
    found=$(compgen -G '/usr/local/cuda*/lib64/libcublasLt.so.1[23]' | sort -V | tail -n 1)
    [ -n "$found" ] || found=$(timeout 20 python3 - 2> /dev/null << 'PYTHON'
import glob, os, site, sysconfig
folders = [sysconfig.get_paths()["purelib"], site.getusersitepackages(), *site.getsitepackages()]
for folder in folders:
    for found in sorted(glob.glob(os.path.join(folder, "nvidia", "*", "lib", "libcublasLt.so.1[23]")), reverse=True):
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
    driver=(cuda_driver '::deferred') backend=(cuda_backend '::deferred') models=(cuda_logits '::qwen2') engine=(cuda_engine 'serving::greedy')
    sizes=(--shape 64x96 --rank 8 --rows 1 --rows 5 --rounds 1)
    whole=(--shape tiny --tokens 3 --rounds 1 --streams 1 --streams 8)
else
    export MANYLORA_CARD=1
    find_blas
    on_device=(env) parity=(env "KERNELS=$here/kernels")
    driver=(cuda_driver) backend=(cuda_backend) models=(cuda_logits) engine=(cuda_engine)
    # Both ends of what models have, in the time that there is.
    sizes=(--shape 896x4864 --shape 4096x14336 --rank 16 --rank 64 --rows 1 --rows 8 --rows 64 --rounds 5)
    whole=(--shape 7b)
fi

say "ManyLoRA $(tr '\n' ' ' < "$here/version.txt"), $(uname -sm), $has"
divided=0
if [ "$emulated" = 0 ] && command -v nvidia-smi > /dev/null; then
    fields=name,driver_version,memory.total,memory.used,utilization.gpu,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,compute_mode,mig.mode.current
    seen=$(timeout 30 nvidia-smi --query-gpu="$fields" --format=csv 2>&1) || seen="nvidia-smi: ${seen:-no answer after 30 s}"
    say "$seen"
    ! grep -q 'Enabled' <<< "$seen" || divided=1
    ! grep -q 'Exclusive' <<< "$seen" || say "NOTE     a card is in an exclusive mode: tests that run side by side get in each other's way (\`nvidia-smi -c DEFAULT\` ends it)"
fi
limited 120 "${on_device[@]}" "$here/bin/kernels" --device cuda --describe > "$scratch/card" 2>&1 || {
    reason=$(cat "$scratch/card")
    [ -n "$reason" ] || reason='the card did not answer within 120 s'
    say "no card that can be used: $reason"
    [ "$divided" = 0 ] || say "NOTE     MIG is enabled: make an instance (\`nvidia-smi mig -cgi ... -C\`), or name one in CUDA_VISIBLE_DEVICES (\`nvidia-smi -L\` lists them)"
    printf '{\n  "card": null, "reason": %s\n}\n' "$(quoted "$reason")" > "$out/summary.json"
    exit "$NO_CARD"
}
card=$(tail -n 1 "$scratch/card")
say "$card"
[ "$emulated" = 1 ] || ! grep -q ', emulated' <<< "$card" || refuse 'MANYLORA_CUDA_LIBRARY names an emulated device: unset it, or give --emulated'
# GiB, in tenths.
tenths() { local found; found=$(sed -n "s/.* \([0-9]*\)\.\([0-9]\) GiB$1.*/\1\2/p" <<< "$card"); echo $((10#${found:-0})); }
total=$(tenths ', driver') free=$(tenths ' free')
if [ "$emulated" = 0 ] && [ "$free" -lt $((total * 9 / 10)) ]; then
    say "NOTE     others hold memory of this card ($((free / 10)) of $((total / 10)) GiB are free): what is measured is not the card alone"
fi
! grep -q ' MIG ' <<< "$card" || say 'NOTE     what is measured is an instance of a card that is divided (MIG)'
blas=1
if grep -q ', no cuBLASLt (' <<< "$card"; then
    blas=0
    say "NOTE     cuBLASLt was not found (\`pip install nvidia-cublas\` brings it): base products are by our own kernels"
fi

part 'kernel parity' 90 "${parity[@]}" "$here/bin/kernel-tests" attention lora rows matmul largest
part 'device functions' 30 "${parity[@]}" "$here/bin/kernel-tests" device
part 'driver layer' 60 "$here/bin/${driver[0]}" "${driver[@]:1}"
part 'backend' 90 "$here/bin/${backend[0]}" "${backend[@]:1}"
part 'tiny models against the oracle' 120 "$here/bin/${models[0]}" "${models[@]:1}"
part 'engine' 120 "$here/bin/${engine[0]}" "${engine[@]:1}"
for name in 'driver layer' 'backend' 'tiny models against the oracle' 'engine'; do
    show "$name" '\.\.\. skipped:' | sed 's/^test /skipped  /; s/ \.\.\. skipped: /: /'
done

if ! command -v python3 > /dev/null; then
    skip 'wheel' 'there is no python3'
elif ! has_python 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    skip 'wheel' "it needs Python 3.10 or newer, and this is $(python3 -V 2>&1)"
else
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
' "$here/wheel" "$scratch/wheel"
fi

products=(--products own)
[ "$blas" = 0 ] || products+=(--products library)
part 'bench table' 240 "${on_device[@]}" "$here/bin/kernels" --device cuda --json "$out/kernels.json" "${products[@]}" "${sizes[@]}"
show 'bench table' '^cuda '
[ "$blas" = 1 ] || skip 'bench table of cuBLASLt' 'it is not there'

# The core is over; what follows has time limits of its own.
deadline=''

# What random weights take, in MiB, and the budget that they are measured under, in tenths of a GB.
readonly WEIGHTS=20600 BUDGET=240 LEAST_BUDGET=226

# Why the 7B shape cannot be measured here; nothing where it can.
unfit_for_seven_billion() {
    mkdir -p "$work" 2> /dev/null && [ -w "$work" ] || { echo "$work cannot be written; set WORK"; return; }
    [ "$emulated" = 0 ] || return 0
    local room there
    there=$(du -sm "$work" 2> /dev/null | cut -f 1)
    room=$(df -Pm "$work" | awk 'NR == 2 { print $4 }')
    if [ $((room + there)) -lt "$WEIGHTS" ]; then
        echo "$work has $room MiB free and its weights need $((WEIGHTS - there)) more; set WORK"
    elif [ "$budget" -lt "$LEAST_BUDGET" ]; then
        echo "$((free / 10)) GiB of the card are free, and its weights, adapters and steps need $((LEAST_BUDGET / 10)) GB"
    fi
}

if [ "$full" = 1 ]; then
    work=${WORK:-${TMPDIR:-/tmp}/manylora-gpu-check}
    # The driver takes some of what is free.
    budget=$((free * 1074 / 1000 - 6))
    [ "$emulated" = 0 ] && [ "$budget" -lt "$BUDGET" ] || budget=$BUDGET
    budgeted=(--budget "$((budget / 10)).$((budget % 10))")
    unfit=$(unfit_for_seven_billion)
    measured=0
    if ! wanted '7B shape'; then
        [ ! -e "$out/card.json" ] || measured=1
    elif [ -n "$unfit" ]; then
        skip '7B shape' "$unfit"
    else
        part '7B shape' 1800 "${on_device[@]}" "$here/bin/card" --folder "$work" --json "$out/card.json" "${budgeted[@]}" "${whole[@]}" && measured=1
        show '7B shape' '^(ledger|decode|goal|prefill|cold load|driver)'
    fi
    if [ "$measured" = 0 ]; then
        skip 'vLLM side by side' 'there is nothing of ours to compare with'
    elif ! has_python 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'; then
        skip 'vLLM side by side' 'python3 has no vllm here'
    else
        attempt 'vLLM side by side' 1800 - python3 "$here/gpu_vllm.py" --folder "$work" --ours "$out/card.json" --json "$out/vllm.json"
        show 'vLLM side by side' '^vLLM '
    fi
    if [ -z "${MODEL:-}" ]; then
        skip 'real model' 'MODEL names no folder'
    else
        part 'real model' 600 "${on_device[@]}" "$here/bin/card" --json "$out/real-model.json" "${budgeted[@]}" --model "$MODEL"
        show 'real model' '^real model'
    fi
    if [ "$emulated" = 1 ]; then
        skip 'compute-sanitizer' 'it needs a card'
    elif command -v compute-sanitizer > /dev/null; then
        for tool in memcheck racecheck synccheck; do
            attempt "compute-sanitizer $tool" 600 9 "${parity[@]}" compute-sanitizer --tool "$tool" --error-exitcode 9 "$here/bin/kernel-tests" device lora matmul attention rows largest
        done
    else
        skip 'compute-sanitizer' 'it is not there'
    fi
else
    skip '7B shape, vLLM, real model, compute-sanitizer' 'only with --full'
fi

[ "${#results[@]}" -gt 0 ] || refuse "no part's name contains \`$only\`"
summary true || failures=$((failures + 1))
say "$failures failures in $SECONDS s; results in $out"
[ "$failures" = 0 ]
