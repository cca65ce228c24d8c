#!/usr/bin/env bash
# Fuzzes every target for a while: fuzz/run.sh SECONDS [TARGET...]
#
# Needs cargo-fuzz on PATH and a C++ compiler; runs on the stable toolchain, without a sanitizer. What was learned stays
# in corpus/, beside the committed seeds. A crash, a hang or too much memory ends it with the reproducer's path.
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:?"usage: fuzz/run.sh SECONDS [TARGET...]"}
shift
# An address space this small turns any huge allocation into a crash, touched or not; threads would reserve it too.
export RAYON_NUM_THREADS=1 MALLOC_ARENA_MAX=1
readonly ADDRESS_SPACE_KIB=$((1 << 20))

started=$SECONDS
cargo metadata --locked --format-version 1 >/dev/null
cargo fuzz build --sanitizer none 2>build.log || { cat build.log >&2; exit 1; }
rm -f build.log
echo "fuzz targets built in $((SECONDS - started)) s"
[ $# -gt 0 ] || mapfile -t targets < <(cargo fuzz list)
[ $# -eq 0 ] || targets=("$@")

log=$(mktemp)
trap 'rm -f "$log"' EXIT
for target in "${targets[@]}"; do
    mkdir -p "corpus/$target" "artifacts/$target"
    if ! (
        ulimit -v "$ADDRESS_SPACE_KIB"
        binary=${CARGO_TARGET_DIR:-target}/$(rustc -vV | sed -n 's/^host: //p')/release/$target
        "$binary" "corpus/$target" "corpus-seeds/$target" -dict=formats.dict -artifact_prefix="artifacts/$target/" \
            -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=512 -print_final_stats=1
    ) >"$log" 2>&1; then
        grep -v '^#' "$log" | tail -n 40 >&2
        echo "$target: FAILED; reproduce with fuzz/$(sed -n 's/.*Test unit written to \(.*\)/\1/p' "$log" | tail -n 1)" >&2
        exit 1
    fi
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    features=$(sed -n 's/.* cov: \([0-9]*\) ft: \([0-9]*\).*/\1 edges/p' "$log" | tail -n 1)
    echo "$target: no crash in ${runs:-0} runs, ${features:-no coverage}"
done
