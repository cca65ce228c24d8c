"""The machine that figures belong to: its processor, and how busy other things keep it."""

import os
import resource
from pathlib import Path
from typing import Any


def cpu() -> tuple[str, set[str]]:
    """The CPU's name and its feature flags."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    family = f"family {fields.get('cpu family', '?')} model {fields.get('model', '?')}"
    return f"{fields.get('model name', os.uname().machine)}, {family}", set(fields.get("flags", "").split())


def multiplies_bf16() -> bool:
    """Whether the CPU has instructions for products of bf16."""
    return bool(cpu()[1] & {"avx512_bf16", "amx_bf16"})


def simd_level(flags: set[str]) -> str:
    """The widest instructions that matter here."""
    if {"amx_tile", "amx_bf16"} <= flags:
        return "amx"
    if {"avx512f", "avx512_bf16"} <= flags:
        return "avx512bf16"
    return "avx2" if {"avx2", "fma"} <= flags else os.uname().machine


def describe(threads: int) -> dict[str, Any]:
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
