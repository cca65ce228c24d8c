"""Writes the licence texts of every crate that is compiled into the wheel.

    python scripts/third_party_notices.py            # writes THIRD_PARTY_NOTICES.txt
    python scripts/third_party_notices.py --check    # fails if the file is not what would be written

The crates are those that `cargo metadata` resolves from Cargo.lock for the extension module on the platforms that
wheels are made for. Texts are read from the crates' own packages, and a text that several crates share is written once.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTICES = ROOT / "THIRD_PARTY_NOTICES.txt"
EXTENSION = "manylora-py"
FEATURES = f"{EXTENSION}/cuda"
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin")
TEXTS = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)", re.IGNORECASE)
# Files that are named like a licence and are something else.
NO_TEXTS = {".rs", ".toml", ".json", ".spdx"}

HEAD = """Third-party notices

ManyLoRA's extension module contains the following crates, compiled from their packages without changes. Each is listed
with its version and the licence that its manifest names, then the texts that come with them, each once with the crates
that it comes with.
"""


def metadata(platform: str) -> dict[str, Any]:
    """Return what cargo resolves for a platform."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--features", FEATURES]
    run = subprocess.run(
        [*command, "--filter-platform", platform], cwd=ROOT, check=False, capture_output=True, text=True
    )
    if run.returncode != 0:
        sys.exit(f"`cargo metadata` failed for {platform}: {run.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def linked(resolved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the packages from elsewhere that the extension is linked with, by id: through normal dependencies only."""
    packages = {package["id"]: package for package in resolved["packages"]}
    nodes = {node["id"]: node for node in resolved["resolve"]["nodes"]}
    (start,) = (package["id"] for package in resolved["packages"] if package["name"] == EXTENSION)
    seen, left = {start}, [start]
    while left:
        for dependency in nodes[left.pop()]["deps"]:
            normal = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            if normal and dependency["pkg"] not in seen:
                seen.add(dependency["pkg"])
                left.append(dependency["pkg"])
    return {name: packages[name] for name in seen if packages[name]["source"] is not None}


def texts(package: dict[str, Any]) -> list[str]:
    """Return the licence texts in a crate's package, without the space around them."""
    folder = Path(package["manifest_path"]).parent
    named = [folder / package["license_file"]] if package.get("license_file") else []
    named += sorted(
        path for path in folder.iterdir() if path.is_file() and TEXTS.match(path.name) and path.suffix not in NO_TEXTS
    )
    found: list[str] = []
    for path in named:
        text = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n").strip()
        lines = "\n".join(line.rstrip() for line in text.split("\n"))
        if lines and lines not in found:
            found.append(lines)
    return found


def notices() -> str:
    """Return the whole file."""
    packages: dict[str, dict[str, Any]] = {}
    for platform in PLATFORMS:
        packages.update(linked(metadata(platform)))
    ordered = sorted(packages.values(), key=lambda package: (package["name"], package["version"]))
    lines = [HEAD]
    users: dict[str, list[str]] = {}
    by_digest: dict[str, str] = {}
    for package in ordered:
        title = f"{package['name']} {package['version']}"
        found = texts(package)
        lacking = "" if found else " (no text in its package)"
        lines.append(f"- {title}: {package['license'] or 'see its text'}{lacking}")
        for text in found:
            digest = hashlib.sha256(text.encode()).hexdigest()
            by_digest[digest] = text
            users.setdefault(digest, []).append(title)
    for digest, titles in users.items():
        lines += ["", "=" * 80, ", ".join(titles), "-" * 80, by_digest[digest]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the file, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the file is not up to date, and write nothing")
    arguments = parser.parse_args()
    wanted = notices()
    if not arguments.check:
        NOTICES.write_text(wanted, encoding="utf-8")
        print(f"{NOTICES.name}: {len(wanted):,} bytes")
    elif not NOTICES.is_file() or NOTICES.read_text(encoding="utf-8") != wanted:
        sys.exit(f"{NOTICES.name} is not up to date: run `python scripts/third_party_notices.py`")


if __name__ == "__main__":
    main()
