#!/usr/bin/env bash
# Makes the archive that scripts/gpu_check.sh runs from, on a machine with everything that builds need. Called by
# `make gpu-archive`, which says where things are:
#   ARCHIVE=file.tar.gz BUILT=folder CARGO=cargo MATURIN=maturin NVCC=path
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
limit=$((64 << 20))
# The oldest C library that programs may need: that of systems which are in use on machines with cards.
glibc=2.34
cd "$root"
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
folder=$stage/manylora-gpu-check
mkdir -p "$folder"/{bin,kernels,emulated,oracle,wheel}

# Images for all cards, in programs and beside them, compiled once.
export MANYLORA_REQUIRE_CUDA=1 MANYLORA_CUDA_IMAGES=$BUILT NVCC
"$CARGO" test --release --workspace --features manylora-benches/cuda,manylora-py/cuda --locked --no-run \
    --test cuda_driver --test cuda_backend --test cuda_logits --test cuda_engine --bench kernels --bench card \
    --message-format=json-render-diagnostics > "$stage/built.json"
python3 - "$stage/built.json" "$folder/bin" << 'PYTHON'
import json, shutil, sys

wanted = {"cuda_driver", "cuda_backend", "cuda_logits", "cuda_engine", "kernels", "card"}
for line in open(sys.argv[1]):
    message = json.loads(line)
    name = message.get("target", {}).get("name")
    if message.get("executable") and name in wanted:
        shutil.copy(message["executable"], f"{sys.argv[2]}/{name}")
        wanted.discard(name)
sys.exit(f"cargo built no {sorted(wanted)}" if wanted else 0)
PYTHON
"$MATURIN" build --release --locked --out "$folder/wheel"
make -j"$(nproc)" -C kernels OUT="$BUILT" NVCC="$NVCC" test-fatbin kernel-tests emu

cp "$BUILT/kernel-tests" "$folder/bin"
for source in kernels/*.cu kernels/tests/*.cu; do
    image=${source#kernels/}
    cp "$BUILT/${image%.cu}.fatbin" "$folder/kernels"
done
cp "$BUILT"/libcuda.so "$BUILT"/libcublasLt.so "$folder/emulated"
for base in tests/oracle/*/expected.safetensors; do
    cp -r "$(dirname "$base")" "$folder/oracle"
done
strip "$folder"/bin/* "$folder"/emulated/*
cp scripts/gpu_check.sh scripts/gpu_vllm.py "$folder"
for program in "$folder"/bin/*; do
    needed=$(objdump -T "$program" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1)
    if [ "$(printf '%s\n' "GLIBC_$glibc" "$needed" | sort -V | tail -n 1)" != "GLIBC_$glibc" ]; then
        echo "${program##*/} needs $needed, and $glibc is what machines with cards have" >&2
        exit 1
    fi
done
{
    git describe --always --dirty 2> /dev/null || sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml
    cat "$BUILT/architectures.txt"
    echo "glibc $glibc"
} > "$folder/version.txt"

mkdir -p "$(dirname "$ARCHIVE")"
tar -C "$stage" --owner=0 --group=0 --sort=name -czf "$ARCHIVE" manylora-gpu-check
size=$(stat -c %s "$ARCHIVE")
du -sh "$folder"/* | sed "s|$folder/||"
if [ "$size" -gt "$limit" ]; then
    echo "$ARCHIVE has $size bytes and may have $limit" >&2
    exit 1
fi
echo "$ARCHIVE: $((size >> 10)) KiB of at most $((limit >> 10))"
