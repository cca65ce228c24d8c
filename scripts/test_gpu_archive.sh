#!/usr/bin/env bash
# Tests the archive of `make gpu-archive` on a machine without a card: unpacked in a clean folder, everything on the emulated
# device, what the test programs do on a card, a stop in the middle, and the answers where something is missing. MODEL names
# a real model; without one that part is not tested.
set -euo pipefail

archive=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
tar -C "$folder" -xzf "$archive"
cd "$folder"
unpacked=$folder/manylora-gpu-check

fail() { echo "$*" >&2; exit 1; }

# Nothing of the build may be needed: no variables, no tools beyond the system's.
clean=(env -i "PATH=/usr/bin:/bin" "HOME=$folder" "TMPDIR=$folder")

# In place of vLLM, a package that takes what vLLM 0.33 takes and refuses what that refuses. $BROKEN: as one that finds no card.
mkdir -p "$folder/packages/vllm/lora"
touch "$folder/packages/vllm/lora/__init__.py"
cat > "$folder/packages/vllm/lora/request.py" << 'PYTHON'
import os


class LoRARequest:
    def __init__(self, lora_name, lora_int_id, lora_path=""):
        assert lora_int_id >= 1 and os.path.isfile(f"{lora_path}/adapter_model.safetensors"), lora_path
        self.lora_name, self.lora_int_id = lora_name, lora_int_id
PYTHON
cat > "$folder/packages/vllm/__init__.py" << 'PYTHON'
import os
import time
from types import SimpleNamespace

__version__ = "stand-in"


class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0.0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, model, *, skip_tokenizer_init, dtype, gpu_memory_utilization, max_num_seqs, enable_prefix_caching,
                 enable_lora, max_loras, max_lora_rank):
        if os.environ.get("BROKEN"):
            raise RuntimeError("Failed to infer device type")
        assert os.path.isfile(f"{model}/config.json") and os.path.isfile(f"{model}/model.safetensors"), model
        assert skip_tokenizer_init and dtype == "bfloat16" and 0 < gpu_memory_utilization <= 1 and enable_lora
        assert max_lora_rank in {1, 8, 16, 32, 64, 128, 256, 320, 512} and not enable_prefix_caching
        self.most, self.max_loras = max_num_seqs, max_loras

    def generate(self, prompts, sampling_params, *, use_tqdm, lora_request=None):
        assert len(prompts) <= self.most and (lora_request is None or len(lora_request) == len(prompts))
        assert len({lora.lora_int_id for lora in lora_request or []}) <= self.max_loras
        assert all(0 < token < 40_960 for prompt in prompts for token in prompt["prompt_token_ids"])
        tokens = [0] * sampling_params.max_tokens
        time.sleep(0.05 * len(tokens))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]) for _ in prompts]
PYTHON

with_model=()
[ -z "${MODEL:-}" ] || with_model=("MODEL=$MODEL")
"${clean[@]}" OUT="$folder/results" PYTHONPATH="$folder/packages" ${with_model[@]+"${with_model[@]}"} "$unpacked/gpu_check.sh" --emulated --full | tee said
python3 - "$folder/results" "${MODEL:+model}" << 'PYTHON'
import json, sys

read = lambda name: json.load(open(f"{sys.argv[1]}/{name}"))
summary, kernels, card, vllm = read("summary.json"), read("kernels.json"), read("card.json"), read("vllm.json")
passed = {part["part"] for part in summary["parts"] if part["outcome"] == "pass"}
needed = {"kernel parity", "device functions", "driver layer", "backend", "tiny models against the oracle", "engine",
          "wheel", "bench table", "7B shape", "vLLM side by side"} | ({"real model"} if sys.argv[2] else set())
assert summary["failures"] == 0 and summary["emulated"] and summary["complete"] and needed <= passed, (needed - passed, summary)
cases = kernels["cases"]
assert "emulated" in kernels["card"] and {case["caches"] for case in cases} == {"warm", "flushed"}
assert {case["popularity"] for case in cases} == {None, "identical", "uniform", "skewed", "distinct"}
assert {case["products"] for case in cases} == {"own", "library"}
assert all(case["device"] == "cuda" and case["microseconds"] > 0 and case["fraction_of_limit"] > 0 for case in cases)
assert {case["case"] for case in card["cases"]} == {"ledger", "decode", "goal", "prefill", "cold load", "driver"}
ledger = [case for case in card["cases"] if case["case"] == "ledger"]
assert len(ledger) == 18 and all(case["planned"] == case["held"] for case in ledger), ledger
mixed = [case for case in card["cases"] if case["case"] == "decode" and case["adapters"] > 0]
assert all(case["reached"] == (case["of_base_speed"] >= case["goal"] == 0.85) for case in mixed), mixed
(goal,) = [case for case in card["cases"] if case["case"] == "goal"]
assert (goal["cases"], goal["reached"]) == (len(mixed), sum(case["reached"] for case in mixed)), (goal, mixed)
# The same cases, each with what both made of it. The stand-in takes 50 ms for a token, on any number of streams.
ours = {(case["streams"], case["adapters"]): case["tokens_per_second"] for case in card["cases"] if case["case"] == "decode"}
theirs = {(case["streams"], case["adapters"]): case for case in vllm["cases"]}
assert ours.keys() == theirs.keys() and len(ours) == 5, (ours, theirs)
for (streams, adapters), case in theirs.items():
    assert case["manylora_tokens_per_second"] == ours[streams, adapters]
    assert 0.1 * streams / 0.05 < case["tokens_per_second"] < 3 * streams / 0.05, case
    assert abs(case["manylora_over_vllm"] * case["tokens_per_second"] / ours[streams, adapters] - 1) < 1e-6
if sys.argv[2]:
    real = read("real-model.json")["cases"]
    assert len(real) == 4 and all(case["failure"] is None and case["certain"] > 0 for case in real), real
print(f"{len(cases)} rows in the bench table, {len(card['cases'])} of the engine, {len(theirs)} beside vLLM's")
PYTHON
grep -q '^vLLM stand-in,   8 streams,  8 adapters: .* x[0-9.]* of it$' said || fail 'what was measured of vLLM is not shown'
# It is not ManyLoRA's failure when vLLM fails, or is not there.
again=("$unpacked/gpu_check.sh" --emulated --full --only vLLM)
"${clean[@]}" OUT="$folder/results" PYTHONPATH="$folder/packages" BROKEN=1 "${again[@]}" | grep '^skipped  vLLM side by side: it ended with.*Failed to infer device type'
"${clean[@]}" OUT="$folder/results" "${again[@]}" | grep '^skipped  vLLM side by side: python3 has no vllm'

# Each program as on a card, which has the images of the archive, knows nothing that only the emulated device can tell, and may
# have no cuBLASLt. The test programs say by name what they leave out.
as_on_card=("${clean[@]}" MANYLORA_CARD=1 "MANYLORA_CUDA_LIBRARY=$unpacked/emulated/libcuda.so" EMU_SCHEDULE=background "MANYLORA_TEST_LOGS=$folder" "MANYLORA_ORACLE_FOLDER=$unpacked/oracle"
    "LIBCUDA=$unpacked/emulated/libcuda.so" "KERNELS=$unpacked/kernels")
run_as_on_card() { # program, its arguments
    local program=$1 start=$SECONDS
    "${as_on_card[@]}" "MANYLORA_CUBLASLT_LIBRARY=$blas" "$unpacked/bin/$program" "${@:2}" > as-on-card 2>&1 || { cat as-on-card; fail "$program fails as on a card, with cuBLASLt \`$blas\`"; }
    echo "as on a card, cuBLASLt \`${blas##*/}\`: $program ($((SECONDS - start)) s): $(tail -n 1 as-on-card)"
    ran+=("$program")
}
for blas in "$unpacked/emulated/libcublasLt.so" ''; do
    ran=()
    for program in cuda_driver cuda_backend cuda_logits cuda_engine kernel-tests; do
        run_as_on_card "$program"
    done
    products=(--products own)
    [ -z "$blas" ] || products+=(--products library)
    run_as_on_card kernels --device cuda "${products[@]}" --shape 64x96 --rank 8 --rows 1 --rows 5 --rounds 1
    run_as_on_card card --folder "$folder/random" --shape tiny --tokens 3 --rounds 1 --streams 1 --streams 8
    for program in "$unpacked"/bin/*; do
        [[ " ${ran[*]} " == *" ${program##*/} "* ]] || fail "${program##*/} was not run as on a card"
    done
done
"${as_on_card[@]}" "$unpacked/bin/cuda_engine" failing::every > as-on-card
grep 'failing::every_function_in_turn ... skipped: makes calls of the driver fail' as-on-card

# A stop in the middle: soon, with nothing left running, and what was found until then is kept.
"${clean[@]}" OUT="$folder/stopped" "$unpacked/gpu_check.sh" --emulated > stopped.txt 2>&1 &
running=$!
for _ in $(seq 600); do
    [ ! -e "$folder/stopped/logs/driver-layer.log" ] || break
    sleep 0.1
done
kill -TERM "$running"
status=0 start=$SECONDS
wait "$running" || status=$?
[ "$status" = 130 ] && [ $((SECONDS - start)) -lt 30 ] || fail "a stop ended with $status after $((SECONDS - start)) s: $(cat stopped.txt)"
grep '^stopped after' stopped.txt
python3 -c '
import json, sys
summary = json.load(open(sys.argv[1]))
assert not summary["complete"] and [part["part"] for part in summary["parts"]][:1] == ["kernel parity"], summary' "$folder/stopped/summary.json"
[ -z "$(ls -d "$folder"/stopped/scratch.* 2> /dev/null)" ] || fail 'a stop leaves its scratch folder'
for program in /proc/[0-9]*/exe; do
    [[ $(readlink "$program" 2> /dev/null) != "$unpacked"/* ]] || fail "a stop leaves a program running: $program"
done

# A core that takes longer than it may ends in time, and says what it did not come to.
status=0 start=$SECONDS
"${clean[@]}" OUT="$folder/late" CORE=1 "$unpacked/gpu_check.sh" --emulated > late.txt 2>&1 || status=$?
[ "$status" = 1 ] && [ $((SECONDS - start)) -lt 60 ] || fail "a core of one second ended with $status after $((SECONDS - start)) s: $(cat late.txt)"
grep "^FAIL     bench table: not reached, since the core's 1 s are over" late.txt
grep -q '"part": "engine", "outcome": "not reached"' "$folder/late/summary.json" || fail "$(cat "$folder/late/summary.json")"

# What cannot be checked: each with its own exit code and a line that says why.
refused() { # exit code, words, command
    local wanted=$1 words=$2 status=0 said
    shift 2
    said=$("$@" 2>&1) || status=$?
    if [ "$status" != "$wanted" ] || ! grep -h "$words" <<< "$said"; then
        fail "\`$*\` ended with $status, and $wanted with \`$words\` was expected: $said"
    fi
}
refused 3 'unknown argument' "${clean[@]}" "$unpacked/gpu_check.sh" --fast
refused 3 'CORE is .soon.' "${clean[@]}" OUT="$folder/late" CORE=soon "$unpacked/gpu_check.sh" --emulated
refused 3 "no part's name" "${clean[@]}" OUT="$folder/nothing" "$unpacked/gpu_check.sh" --emulated --only nonsense
refused 3 'results cannot be written' "${clean[@]}" OUT=/proc/results "$unpacked/gpu_check.sh" --emulated
refused 3 'need glibc' "${clean[@]}" OUT="$folder/old" bash -c "getconf() { echo glibc 2.31; }; export -f getconf; exec '$unpacked/gpu_check.sh' --emulated"
refused 2 'driver is too old.*11.8' "${clean[@]}" OUT="$folder/old" EMU_DRIVER_VERSION=11080 "$unpacked/gpu_check.sh" --emulated
refused 2 'no NVIDIA card' "${clean[@]}" OUT="$folder/none" EMU_DEVICES=0 "$unpacked/gpu_check.sh" --emulated
refused 3 'names an emulated device' "${clean[@]}" OUT="$folder/emulated" "MANYLORA_CUDA_LIBRARY=$unpacked/emulated/libcuda.so" "$unpacked/gpu_check.sh"

# A card is offered to this script on machines that have one; there it must not be hidden.
if ldconfig -p 2> /dev/null | grep -q 'libcuda\.so'; then
    echo 'this machine has a driver: what is said without one is not tested'
    exit 0
fi
refused 2 'no card that can be used' "${clean[@]}" OUT="$folder/without" "$unpacked/gpu_check.sh"
