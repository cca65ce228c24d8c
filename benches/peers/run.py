"""Compares ManyLoRA with PEFT and mistral.rs on this machine, side by side.

`setup` makes a virtual environment for each, `measure` runs interleaved rounds (one process at a time) and writes the
result file and its chart, `agreement` checks that the engines compute the same tokens. README.md says what is measured.
"""

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import worker

HERE = Path(__file__).resolve().parent
# Rounds go through these in turn, so that a disturbance of the machine does not hit one engine only.
PEERS = ("manylora", "peft", "mistralrs")
ADAPTERS = 8
VOCABULARIES = {"half-billion": 151_936, "small": 4096}
# Name, rows' adapters (None is the base), prompt length, decode or prefill. Base first: see `peer_peft.py`.
CASES = (
    ("decode, 1 base row", [None], 64, True),
    ("decode, 8 base rows", [None] * 8, 64, True),
    ("prefill, 512 base tokens", [None], 512, False),
    ("decode, 8 rows on one adapter", [0] * 8, 64, True),
    ("decode, 8 rows on 8 adapters", list(range(8)), 64, True),
)
# Relative difference of the two best logits below which rounding may choose either.
TIE = 1e-4


def venv_python(venvs: Path, name: str) -> Path:
    """The interpreter of a virtual environment that `setup` made."""
    return venvs / name / "bin" / "python"


def setup(arguments: argparse.Namespace) -> None:
    """Make the virtual environments."""
    wanted = {
        "bench": ["-r", str(HERE / "requirements.txt")],
        "manylora": [str(arguments.wheel)],
        "peft": ["-r", str(HERE / "requirements-peft.txt")],
        # From source it would need a toolchain and half an hour.
        "mistralrs": ["--only-binary=:all:", "-r", str(HERE / "requirements-mistralrs.txt")],
    }
    for name in arguments.only or wanted:
        folder = arguments.venvs / name
        print(f"setting up {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(venv_python(arguments.venvs, name)), "-m", "pip", "install", "--quiet", "--upgrade"]
        subprocess.run(pip + wanted[name], check=True)


def cpu() -> tuple[str, set[str]]:
    """The CPU's name and its feature flags."""
    fields = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    family = f"family {fields.get('cpu family', '?')} model {fields.get('model', '?')}"
    return f"{fields.get('model name', os.uname().machine)}, {family}", set(fields.get("flags", "").split())


def simd_level(flags: set[str]) -> str:
    """The widest instructions that matter here."""
    if {"avx512f", "avx512_bf16"} <= flags:
        return "avx512bf16"
    return "avx2" if {"avx2", "fma"} <= flags else os.uname().machine


def machine(threads: int) -> dict[str, Any]:
    """What the figures depend on."""
    name, flags = cpu()
    interesting = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "flags": {flag: flag in flags for flag in interesting},
        "simd": simd_level(flags),
        "memory_bytes": memory,
        "threads": threads,
    }


def busy_seconds() -> float:
    """CPU seconds that the machine has spent on anything."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, interrupts, soft_interrupts, steal = map(int, fields[:8])
    ticks = user + nice + system + interrupts + soft_interrupts + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """CPU seconds of this process's ended children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Bench:
    """The peers, their interpreters and the model."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.peers = arguments.peers or list(PEERS)
        self.threads = arguments.threads or len(os.sched_getaffinity(0))
        self.folder = arguments.models / arguments.shape
        self.pythons = {name: venv_python(arguments.venvs, name) for name in (*self.peers, "bench")}
        self.pythons |= {name: Path(path) for name, _, path in (item.partition("=") for item in arguments.python or [])}
        for name, path in self.pythons.items():
            if not path.exists():
                sys.exit(f"`{path}` for {name} is missing: run `run.py setup`, or give --python {name}=PATH")

    def write_models(self) -> None:
        """Write the model and the adapters, unless they are there."""
        print(f"writing random weights to {self.folder} if they are not there", flush=True)
        command = [str(self.pythons["bench"]), str(HERE / "synthetic.py"), str(self.folder)]
        subprocess.run([*command, "--shape", self.arguments.shape], check=True)

    def dtype(self, peer: str) -> str:
        """What suits the peer best: torch multiplies bf16 slowly without instructions for it."""
        if peer == "peft":
            return self.arguments.peft_dtype or ("bfloat16" if cpu()[1] & {"avx512_bf16", "amx_bf16"} else "float32")
        return "bfloat16"

    def run(self, peer: str, action: str, turn: int, **changes: Any) -> dict[str, Any]:
        """Run one peer's process to its end and return its report."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            plan = {
                "action": action,
                "model": str(self.folder / "base"),
                "adapters": [str(self.folder / f"adapter-{index}") for index in range(ADAPTERS)],
                "vocab": VOCABULARIES[self.arguments.shape],
                "threads": self.threads,
                "dtype": self.dtype(peer),
                "tokens": self.arguments.tokens,
                "round": turn,
                "cases": [
                    {"name": name, "adapters": rows, "prompt": prompt, "decode": decode, "seed": seed}
                    for seed, (name, rows, prompt, decode) in enumerate(CASES)
                ],
                "report": str(folder / "report.json"),
            } | changes
            (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
            threads = {f"{name}_NUM_THREADS": str(self.threads) for name in ("OMP", "MKL", "RAYON")}
            environment = os.environ | threads | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            command = [str(self.pythons[peer]), str(HERE / f"peer_{peer}.py"), str(folder / "plan.json")]
            start, busy, own = time.monotonic(), busy_seconds(), children_seconds()
            with (folder / "log").open("wb") as log:
                ended = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
            elapsed = time.monotonic() - start
            others = (busy_seconds() - busy) - (children_seconds() - own)
            if ended.returncode != 0 or not (folder / "report.json").exists():
                print((folder / "log").read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
                sys.exit(f"{peer} ended with {ended.returncode}; the end of its output is above")
            report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        # How many cores everything else on the machine kept busy meanwhile.
        return report | {"wall_seconds": elapsed, "other_busy_cores": max(0.0, others / elapsed)}


def measure(arguments: argparse.Namespace) -> None:
    """Run the rounds and write the result file."""
    bench = Bench(arguments)
    bench.write_models()
    description = machine(bench.threads)
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    path = arguments.output or HERE / "results" / f"{date}-{description['simd']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    model = f"{arguments.shape}: random bf16 weights, {ADAPTERS} adapters of rank 16 on all linear maps"
    result = {"date": date, "machine": description, "model": model, "decode_tokens": arguments.tokens, "rounds": []}
    for turn in range(arguments.rounds):
        for peer in bench.peers:
            report = bench.run(peer, "measure", turn)
            result["rounds"].append({"round": turn, "peer": peer, **report})
            rates = ", ".join(rate_text(case["tokens_per_second"]) for case in report["results"].values())
            busy = report["other_busy_cores"]
            print(f"round {turn} {peer:<10} {rates} tok/s; {busy:.2f} cores busy with other things", flush=True)
            # A run that is cut short leaves what it has.
            result |= summary(result["rounds"])
            write(path, result)
    print_table(result)
    if not arguments.skip_agreement:
        check_agreement(bench, path)
    chart(bench, path)


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians per peer and case, and how many times faster ManyLoRA is."""
    peers: dict[str, Any] = {}
    for peer in dict.fromkeys(item["peer"] for item in rounds):
        own = [item for item in rounds if item["peer"] == peer]
        medians = {}
        for name in own[0]["results"]:
            rates = [item["results"][name]["tokens_per_second"] for item in own]
            valid = [rate for rate in rates if rate is not None]
            medians[name] = statistics.median(valid) if valid else None
        rss = statistics.median(item["peak_rss_bytes"] for item in own)
        load = statistics.median(item["load_seconds"] for item in own)
        shared = {"dtype": own[0]["dtype"], "versions": own[0]["versions"], "peak_rss_bytes": rss, "load_seconds": load}
        peers[peer] = {"tokens_per_second": medians, **shared}
    ratios: dict[str, Any] = {}
    for peer in peers:
        if peer != "manylora" and "manylora" in peers:
            pairs = zip(*(peers[name]["tokens_per_second"].items() for name in ("manylora", peer)), strict=True)
            ratios[peer] = {name: ours / theirs if ours and theirs else None for (name, ours), (_, theirs) in pairs}
    return {"medians": peers, "manylora_over": ratios}


def rate_text(rate: float | None) -> str:
    """A rate, or that the machine was too busy to tell."""
    return "disturbed" if rate is None else f"{rate:.1f}"


def table(result: dict[str, Any]) -> Iterator[str]:
    """The lines of the comparison."""
    peers = result["medians"]
    yield f"{'tokens/s, median of rounds':<32}" + "".join(f"{peer:>20}" for peer in peers)
    for name, *_ in CASES:
        line = f"{name:<32}"
        for peer, values in peers.items():
            text = rate_text(values["tokens_per_second"][name])
            ratio = result["manylora_over"].get(peer, {}).get(name)
            line += f"{text if ratio is None else f'{text} (x{ratio:.2f})':>20}"
        yield line
    yield f"{'peak memory, GB':<32}" + "".join(f"{values['peak_rss_bytes'] / 1e9:>20.2f}" for values in peers.values())
    yield f"{'loading, seconds':<32}" + "".join(f"{values['load_seconds']:>20.1f}" for values in peers.values())
    yield f"{'arithmetic':<32}" + "".join(f"{values['dtype']:>20}" for values in peers.values())
    yield "in brackets: how many times as fast ManyLoRA is"


def print_table(result: dict[str, Any]) -> None:
    """Print the comparison, and where ManyLoRA is not ahead."""
    print("\n".join(table(result)))
    for peer, ratios in result["manylora_over"].items():
        for name, ratio in ratios.items():
            if ratio is not None and ratio <= 1:
                print(f"BEHIND {peer} in `{name}`: {ratio:.2f} of its speed")


def check_agreement(bench: Bench, path: Path) -> None:
    """Compare greedy tokens in f32, and put the outcome into the result file."""
    changes = {"dtype": "float32", "tokens": 8}
    reports = {peer: bench.run(peer, "agreement", 0, **changes)["results"] for peer in bench.peers}
    outcome: dict[str, Any] = {}
    for peer in bench.peers:
        if "peft" not in reports or peer == "peft":
            continue
        outcome[peer] = {
            name: compare(reports["peft"][name], reports[peer][name]["tokens"]) for name in reports["peft"]
        }
        for name, counts in outcome[peer].items():
            print(f"{peer} and peft, {name}: {counts['equal']} greedy tokens equal, {counts['ties']} rows end in a tie")
            if counts["different"]:
                print(f"WARNING: {peer} differs from peft in {counts['different']} rows of `{name}` beyond a tie")
    result = json.loads(path.read_text(encoding="utf-8"))
    write(path, result | {"greedy_agreement_with_peft": outcome})


def compare(reference: dict[str, Any], rows: list[list[int]]) -> dict[str, int]:
    """Compare each row up to its first difference, which must be where two tokens tie."""
    counts = {"equal": 0, "ties": 0, "different": 0, "unreadable": 0}
    for expected, margins, row in zip(reference["tokens"], reference["margins"], rows, strict=True):
        for wanted, margin, found in zip(expected, margins, row, strict=True):
            if wanted == found:
                counts["equal"] += 1
                continue
            outcome = "unreadable" if found == worker.UNREADABLE else "ties" if margin < TIE else "different"
            counts[outcome] += 1
            break
    return counts


def agreement(arguments: argparse.Namespace) -> None:
    """Check the greedy tokens for a result file that has none yet."""
    bench = Bench(arguments)
    bench.write_models()
    check_agreement(bench, arguments.result)


def chart(bench: Bench, path: Path) -> None:
    """Draw the result, where matplotlib is installed."""
    command = [str(bench.pythons["bench"]), str(HERE / "chart.py"), str(path)]
    if subprocess.run(command, check=False).returncode != 0:
        print("no chart was drawn")


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result file."""
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("setup", help="make the virtual environments")
    one.add_argument("--venvs", type=Path, required=True)
    one.add_argument("--wheel", type=Path, required=True, help="ManyLoRA's wheel")
    one.add_argument("--only", nargs="+", choices=("bench", *PEERS))
    one.set_defaults(action=setup)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--venvs", type=Path, required=True)
    common.add_argument("--python", nargs="+", metavar="PEER=PATH", help="other interpreters than those of --venvs")
    common.add_argument("--models", type=Path, default=HERE.parents[1] / "target" / "peer-models")
    common.add_argument("--shape", choices=VOCABULARIES, default="half-billion")
    common.add_argument("--peers", nargs="+", choices=PEERS)
    common.add_argument("--threads", type=int, help="of each engine; all cores if not given")
    common.add_argument("--tokens", type=int, default=32, help="new tokens of the decode cases")
    common.add_argument("--peft-dtype", choices=("bfloat16", "float32"))
    one = commands.add_parser("measure", parents=[common], help="run the rounds")
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--output", type=Path, help="result file; results/DATE-SIMD.json if not given")
    one.add_argument("--skip-agreement", action="store_true")
    one.set_defaults(action=measure)
    one = commands.add_parser("agreement", parents=[common], help="compare greedy tokens")
    one.add_argument("result", type=Path, help="result file to put the outcome into")
    one.set_defaults(action=agreement)
    arguments = parser.parse_args()
    arguments.action(arguments)


if __name__ == "__main__":
    main()
