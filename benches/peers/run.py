"""Compares ManyLoRA with other engines on this machine, side by side.

`setup` makes a virtual environment for each, `measure` runs interleaved rounds (one process at a time) and writes the
result file and its chart, `agreement` checks that the engines compute the same tokens. README.md says what is measured.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import agreement
import environments
import machine
import report
from cases import CASES, COMPARED, Case
from engines import ENGINES
from shapes import ADAPTERS, COLD_ADAPTERS, RANK, SHAPES

HERE = Path(__file__).resolve().parent
# New tokens of each row whose tokens are compared.
COMPARED_TOKENS = 6


class EngineError(Exception):
    """An engine's process ended without a report."""


class Bench:
    """The engines, their interpreters and the model."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.engines = arguments.engines or list(ENGINES)
        self.threads = arguments.threads or len(os.sched_getaffinity(0))
        self.folder: Path = arguments.models / arguments.shape
        names = dict.fromkeys(["bench", "manylora", *(ENGINES[engine].name for engine in self.engines)])
        self.pythons = {name: environments.python(arguments.venvs, name) for name in names}
        for name, path in self.pythons.items():
            if not path.exists():
                sys.exit(
                    f"`{path}` is missing: run `run.py setup --only {name}`, or leave the engine out with --engines"
                )

    def prepare(self) -> None:
        """Write the model, the adapters, and what engines want instead of safetensors, unless they are there."""
        print(f"writing random weights to {self.folder} if they are not there", flush=True)
        self.execute("bench", "synthetic.py", str(self.folder), "--shape", self.arguments.shape)
        base = str(self.folder / "base")
        for name in self.engines:
            engine, target = ENGINES[name], str(self.files(name))
            if engine.files == "gguf":
                self.execute("bench", "gguf_model.py", base, target, engine.dtype())
            elif engine.files == "openvino":
                self.execute("openvino", "openvino_model.py", base, target)

    def files(self, engine: str) -> Path:
        """The model as an engine loads it."""
        names = {"gguf": f"base-{ENGINES[engine].dtype()}.gguf", "openvino": "base-openvino", "safetensors": "base"}
        return self.folder / names[ENGINES[engine].files]

    def execute(self, name: str, script: str, *arguments: str) -> None:
        """Run one of this folder's scripts, or end."""
        command = [str(self.pythons[name]), str(HERE / script), *arguments]
        if subprocess.run(command, check=False, env=self.environment(name)).returncode != 0:
            sys.exit(f"`{script}` failed; its output is above")

    def environment(self, name: str) -> dict[str, str]:
        """Variables of an engine's process."""
        threads = {f"{library}_NUM_THREADS": str(self.threads) for library in ("OMP", "MKL", "RAYON")}
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        libraries = self.arguments.venvs / name / "lib"
        preloaded = [path for pattern in environments.PRELOADED.get(name, ()) for path in libraries.glob(pattern)]
        if len(preloaded) != len(environments.PRELOADED.get(name, ())):
            sys.exit(f"`{libraries}` should have {environments.PRELOADED[name]}: run `run.py setup --only {name}`")
        preload = {"LD_PRELOAD": ":".join(str(path.resolve()) for path in preloaded)} if preloaded else {}
        # What engines compile for themselves is kept from round to round.
        kept = str(self.folder / "compiled")
        return os.environ | threads | offline | {"VLLM_CACHE_ROOT": kept, "TORCHINDUCTOR_CACHE_DIR": kept} | preload

    def limits(self) -> dict[str, float]:
        """What the machine can do at most at this moment."""
        command = [str(self.pythons["manylora"]), str(HERE / "limits.py"), str(self.threads)]
        found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return found

    def run(self, engine: str, action: str, turn: int, cases: list[dict[str, Any]], dtype: str) -> dict[str, Any]:
        """Run one engine's process to its end and return its report."""
        name = ENGINES[engine].name
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            adapters = [str(self.folder / f"adapter-{index}") for index in range(ADAPTERS + COLD_ADAPTERS)]
            plan = {
                "action": action,
                "model": str(self.files(engine)),
                "adapters": adapters[:ADAPTERS],
                "cold_adapters": adapters[ADAPTERS:],
                "rank": RANK,
                "vocab": SHAPES[self.arguments.shape].vocab,
                "threads": self.threads,
                "dtype": dtype,
                "round": turn,
                "seconds_per_case": self.arguments.seconds_per_case,
                "cases": cases,
                "report": str(folder / "report.json"),
                "scratch": str(folder),
            }
            (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
            command = [str(self.pythons[name]), str(HERE / f"peer_{name}.py"), str(folder / "plan.json")]
            environment = self.environment(name)
            start, busy, own = time.monotonic(), machine.busy_seconds(), machine.children_seconds()
            with (folder / "log").open("wb") as log:
                ended = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
            elapsed = time.monotonic() - start
            others = (machine.busy_seconds() - busy) - (machine.children_seconds() - own)
            if ended.returncode != 0 or not (folder / "report.json").exists():
                print((folder / "log").read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
                raise EngineError(f"{engine} ended with {ended.returncode}; the end of its output is above")
            found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        # How many cores everything else on the machine kept busy meanwhile.
        return found | {"wall_seconds": elapsed, "other_busy_cores": max(0.0, others / elapsed)}

    def wanted(self, engine: str) -> list[Case]:
        """The cases that were asked for and that the engine can do."""
        words = self.arguments.cases or [""]
        return [case for case in self.possible(engine, CASES) if any(word in case.name for word in words)]

    def possible(self, engine: str, cases: tuple[Case, ...]) -> list[Case]:
        """The cases that the engine can do."""
        return [case for case in cases if case.needs in ENGINES[engine].can]


def begin(bench: Bench, path: Path) -> dict[str, Any]:
    """A new result, or the one that is there to go on with."""
    settings = {"machine": machine.describe(bench.threads), "shape": bench.arguments.shape}
    if path.exists():
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if result.get(name) != value:
                sys.exit(
                    f"`{path}` was measured with {name} {result.get(name)}, this is {value}: give another --output"
                )
        print(f"going on with {path}: {len(result['rounds'])} processes were measured")
        return result
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        **settings,
        "model": f"random bf16 weights, {ADAPTERS} adapters of rank {RANK} on all linear maps",
        "cases": {
            case.name: {"rows": len(case.adapters), "prompt": case.prompt, "tokens": case.tokens} for case in CASES
        },
        "rounds": [],
    }


def measure(arguments: argparse.Namespace) -> None:
    """Run the rounds that the result file lacks."""
    bench = Bench(arguments)
    bench.prepare()
    level = machine.describe(bench.threads)["simd"]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    path = arguments.output or HERE / "results" / f"{today}-{level}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result, failed = begin(bench, path), set()
    for turn in range(arguments.rounds):
        for engine in bench.engines:
            before = [entry for entry in result["rounds"] if (entry["round"], entry["engine"]) == (turn, engine)]
            measured = {name for entry in before for name in entry["results"]}
            # A case keeps its prompts, whichever cases are measured.
            cases = [case.plan(CASES.index(case)) for case in bench.wanted(engine) if case.name not in measured]
            if engine in failed or not cases:
                continue
            limits = [bench.limits()]
            try:
                found = bench.run(engine, "measure", turn, cases, ENGINES[engine].dtype())
            except EngineError as error:
                print(error, file=sys.stderr)
                failed.add(engine)
                continue
            limits.append(bench.limits())
            mean = {name: sum(one[name] for one in limits) / len(limits) for name in limits[0]}
            entry = {"round": turn, "engine": engine, "limits": mean, "limits_before_and_after": limits, **found}
            result["rounds"].append(entry)
            result |= report.summary(result)
            # A run that is cut short leaves what it has.
            write(path, result)
            rates = ", ".join(report.number(case["value"]) for case in found["results"].values())
            print(
                f"round {turn} {engine:<14} {rates}; {found['wall_seconds']:.0f} s, "
                f"{found['other_busy_cores']:.2f} cores busy with other things",
                flush=True,
            )
    # A file that needed no more rounds may have been changed since its summary was made.
    result |= report.summary(result)
    write(path, result)
    report.show(result)
    if not arguments.skip_agreement:
        check_agreement(bench, path, failed)
    draw(bench, path)
    if failed:
        sys.exit(f"{', '.join(sorted(failed))} failed; run this again to measure what is missing")


def check_agreement(bench: Bench, path: Path, without: set[str]) -> None:
    """Compare greedy tokens, and put the outcome into the result file."""
    engines = [engine for engine in bench.engines if engine not in without]
    if "peft" not in engines or len(engines) < 2:
        sys.exit("the tokens of engines are compared with PEFT's, which is not among them: give --skip-agreement")
    reports, ties = {}, {}
    for engine in engines:
        # The same prompts in all cases, so that the base and adapters can be told apart.
        cases = [case.plan(0) | {"tokens": COMPARED_TOKENS} for case in bench.possible(engine, COMPARED)]
        own = ENGINES[engine].files == "gguf"
        dtype = ENGINES[engine].dtype() if own else "float32"
        ties[engine] = agreement.ROUNDED_TIE if own else agreement.TIE
        reports[engine] = bench.run(engine, "agreement", 0, cases, dtype)["results"]
    outcome, well = agreement.judge(reports, ties)
    result = json.loads(path.read_text(encoding="utf-8"))
    write(path, result | {"greedy_agreement_with_peft": outcome, "agreement_holds": well})


def agree(arguments: argparse.Namespace) -> None:
    """Check the greedy tokens for a result file that has none yet."""
    bench = Bench(arguments)
    bench.prepare()
    check_agreement(bench, arguments.result, set())


def show(arguments: argparse.Namespace) -> None:
    """Print the table of a result file."""
    result = json.loads(arguments.result.read_text(encoding="utf-8"))
    report.show(result | report.summary(result))


def draw(bench: Bench, path: Path) -> None:
    """Draw the result."""
    bench.execute("bench", "chart.py", str(path))


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result file, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("setup", help="make the virtual environments")
    one.add_argument("--venvs", type=Path, required=True)
    one.add_argument("--wheel", type=Path, help="ManyLoRA's wheel")
    one.add_argument("--only", nargs="+", choices=environments.VENVS)
    one.set_defaults(action=environments.setup)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--venvs", type=Path, required=True)
    common.add_argument("--models", type=Path, default=HERE.parents[1] / "target" / "peer-models")
    common.add_argument("--shape", choices=SHAPES, default="half-billion")
    common.add_argument("--engines", nargs="+", choices=ENGINES, help="all if not given")
    common.add_argument("--cases", nargs="+", metavar="WORDS", help="cases whose names have one of these in them")
    common.add_argument("--threads", type=int, help="of each engine; all cores if not given")
    common.add_argument(
        "--seconds-per-case", type=float, default=3.0, help="a case is repeated until it took this long"
    )
    one = commands.add_parser("measure", parents=[common], help="run the rounds that the result file lacks")
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--output", type=Path, help="result file; results/DATE-SIMD.json if not given")
    one.add_argument("--skip-agreement", action="store_true")
    one.set_defaults(action=measure)
    one = commands.add_parser("agreement", parents=[common], help="compare greedy tokens")
    one.add_argument("result", type=Path, help="result file to put the outcome into")
    one.set_defaults(action=agree)
    one = commands.add_parser("show", help="print the table of a result file")
    one.add_argument("result", type=Path)
    one.set_defaults(action=show)
    arguments = parser.parse_args()
    arguments.action(arguments)


if __name__ == "__main__":
    main()
