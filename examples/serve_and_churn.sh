#!/usr/bin/env bash
# Serves two adapters, asks the base and both, loads a third one while it serves, asks it, unloads it, and sees it gone.
#
#   examples/serve_and_churn.sh                                    on the demo's model (`manylora demo` fetches it)
#   examples/serve_and_churn.sh BASE FIRST SECOND THIRD [FLAG...]  on a base and three adapter folders; flags go to
#                                                                  `manylora serve`
# PYTHON is the interpreter that has manylora (default: python3). Needs curl.
set -euo pipefail

python=${PYTHON:-python3}
if [ $# -eq 0 ]; then
    base=$("$python" -c 'from manylora.cli import smollm2; print(smollm2.find(None))')
    shelf=$("$python" -c 'import manylora, os; print(os.path.join(os.path.dirname(manylora.__file__), "demo", "adapters"))')
    set -- "$base" "$shelf/sql" "$shelf/support" "$shelf/json"
elif [ $# -lt 4 ]; then
    echo "usage: $0 [BASE FIRST SECOND THIRD [FLAG...]]" >&2
    exit 2
fi
first=$(basename "$2") second=$(basename "$3") third=$(basename "$4")

log=$(mktemp)
"$python" -m manylora serve "$1" --served-model-name base --port 0 --max-lora-rank 64 \
    --lora-modules "$first=$2" "$second=$3" \
    --allow-runtime-lora-updating --lora-root "$(dirname "$4")" "${@:5}" 2> "$log" &
server=$!
trap 'kill "$server" 2> /dev/null || true; wait "$server" || true; rm -f "$log"' EXIT

url=
while [ -z "$url" ]; do
    kill -0 "$server" 2> /dev/null || { cat "$log" >&2; exit 1; }
    sleep 0.1
    url=$(sed -n 's/.*listening on \(http[^ ]*\).*/\1/p' "$log")
done

post() { # PATH BODY [CURL-OPTION...]
    curl -sS "${@:3}" "$url$1" -H 'Content-Type: application/json' -d "$2"
}
completion() { # MODEL
    echo "{\"model\": \"$1\", \"prompt\": \"List all customers.\", \"max_tokens\": 16, \"temperature\": 0}"
}
ask() { # MODEL
    post /v1/completions "$(completion "$1")" --fail |
        "$python" -c 'import json, sys; print(f"[{sys.argv[1]}]", json.load(sys.stdin)["choices"][0]["text"])' "$1"
}

ask base
ask "$first"
ask "$second"
post /v1/load_lora_adapter "{\"lora_name\": \"$third\", \"lora_path\": \"$4\"}" --fail
echo
ask "$third"
post /v1/unload_lora_adapter "{\"lora_name\": \"$third\"}" --fail
echo
status=$(post /v1/completions "$(completion "$third")" --output /dev/null --write-out '%{http_code}')
echo "[$third] is answered with status $status now"
[ "$status" = 404 ]
