"""`manylora doctor`: what there is on this machine and in this installation, as a report of a mistake needs it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manylora import _core
from manylora.cache import cache_dir
from manylora.engine_args import cuda_library_folders

EXAMPLES = """\
examples:
  manylora doctor
  manylora doctor --json > report.json
"""
# Packages that this one works with, where they are.
PACKAGES = ("huggingface_hub", "fsspec", "transformers", "tokenizers", "torch", "peft", "numpy", "nvidia-cublas")
# Other programs' variables that decide something here.
OTHERS = (
    "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "LD_LIBRARY_PATH",
    "OPENAI_API_KEY", "XDG_CACHE_HOME",
)  # fmt: skip
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="what there is on this machine, for a report of a mistake",
        description=(
            "Say what there is on this machine and in this installation: instructions, threads, memory, limits, cards, "
            "versions, folders and variables. Nothing is measured, no model is needed, and secrets are not shown."
        ),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found."""
    found = report()
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(lines(found)))
    return 0


def report() -> dict[str, Any]:
    """Return what was found."""
    machine = json.loads(_core.machine(cuda_library_folders()))
    return {
        "versions": {
            "manylora": _core.__version__,
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in PACKAGES},
        },
        "platform": {
            "built_for": machine.pop("platform"),
            "system": platform.platform(),
            "libc": " ".join(platform.libc_ver()).strip(),
            "processor": _processor(),
            "executable": sys.executable,
        },
        "processors": {
            "simd": machine.pop("simd"),
            "logical": machine.pop("logical_processors"),
            "physical_cores": machine.pop("physical_cores"),
            "cgroup_cpus": machine.pop("cgroup_cpus"),
            "default_threads": machine.pop("default_threads"),
        },
        "memory": {
            "total_bytes": _total_memory(),
            "available_bytes": machine.pop("available_bytes"),
            "cgroup_bytes": machine.pop("cgroup_memory_bytes"),
            "huge_pages": _huge_pages(),
        },
        "cuda": machine.pop("cuda"),
        "folders": {name: _folder(path) for name, path in _folders().items()},
        "environment": environment(os.environ),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide something here, without what is secret."""
    shown = {}
    for name in sorted(variables):
        if name.startswith(("MANYLORA_", "VLLM_")) or name in OTHERS:
            is_secret = any(part in name for part in _SECRET)
            shown[name] = "(set, not shown)" if is_secret and variables[name] else variables[name]
    return shown


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or None
    name = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return name or platform.processor() or None


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _huge_pages() -> str | None:
    """Return the setting of transparent huge pages: the word in brackets."""
    try:
        text = _HUGE_PAGES.read_text(encoding="utf-8")
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or text.strip()


def _folders() -> dict[str, Path]:
    from manylora.hub import hub_cache

    return {"cache": cache_dir(), "hub_cache": hub_cache(), "temporary": Path(os.environ.get("TMPDIR") or "/tmp")}


def _folder(path: Path) -> dict[str, Any]:
    there = next((one for one in (path, *path.absolute().parents) if one.exists()), None)
    try:
        free = None if there is None else shutil.disk_usage(there).free
    except OSError:
        free = None
    return {"path": str(path), "exists": path.exists(), "free_bytes": free}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report as people read it."""
    versions, system, processors = found["versions"], found["platform"], found["processors"]
    packages = ", ".join(f"{name} {version}" for name, version in versions["packages"].items() if version is not None)
    yield f"manylora       {versions['manylora']}, Python {versions['python']} ({system['executable']})"
    yield f"packages       {packages or 'none of those that are looked for'}"
    yield f"system         {system['system']}, built for {system['built_for']}"
    yield f"processor      {system['processor'] or 'unknown'}"
    simd = processors["simd"]
    forced = f"; {simd['variable']}={simd['forced']}" if simd["forced"] else f"; {simd['variable']} forces another"
    yield f"SIMD level     {simd['level'] or 'none'} of {', '.join(simd['available'])}{forced}"
    if simd["error"]:
        yield f"               {simd['error']}"
    quota = "no limit" if processors["cgroup_cpus"] is None else f"{processors['cgroup_cpus']:g} processors"
    yield (
        f"threads        {processors['default_threads']} by default: {processors['physical_cores']} physical cores, "
        f"{processors['logical']} logical; cgroup: {quota}"
    )
    memory = found["memory"]
    yield (
        f"memory         {_bytes(memory['available_bytes'])} can be had of {_bytes(memory['total_bytes'])}; cgroup: "
        f"{'no limit' if memory['cgroup_bytes'] is None else _bytes(memory['cgroup_bytes'])}; huge pages: "
        f"{memory['huge_pages'] or 'unknown'}"
    )
    yield from _cuda_lines(found["cuda"])
    for name, folder in found["folders"].items():
        state = "" if folder["exists"] else " (not there yet)"
        yield f"{name.replace('_', ' '):14} {folder['path']}{state}, {_bytes(folder['free_bytes'])} free"
    variables = found["environment"]
    yield "environment    " + ("nothing set" if not variables else "")
    for name, value in variables.items():
        yield f"  {name}={value}"


def _cuda_lines(cuda: Mapping[str, Any]) -> Iterator[str]:
    version = f", CUDA {cuda['driver_version']}" if cuda["driver_version"] else ""
    yield f"driver         {cuda['driver'] or 'none'}{version}"
    yield f"kernels        {cuda['kernels'] or 'none for cards'}"
    if cuda["cublaslt"]:
        yield f"cuBLASLt       {cuda['cublaslt']}"
    for card in cuda["cards"]:
        memory = _bytes(card["memory_bytes"])
        yield f"card           cuda:{card['ordinal']}: {card['name']}, capability {card['capability']}, {memory}"
    for note in cuda["notes"]:
        yield f"               {note}"


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"
