"""The wheel says whose crates it contains, under which licences."""

import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTICES = "THIRD_PARTY_NOTICES.txt"


def test_notices_are_those_of_the_crates_that_are_linked() -> None:
    script = ROOT / "scripts" / "third_party_notices.py"
    done = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_notices_name_crates_with_their_texts() -> None:
    text = (ROOT / NOTICES).read_text(encoding="utf-8")
    for crate in ("pyo3 ", "tokenizers ", "blake3 ", "axum ", "half "):
        assert f"\n- {crate}" in text, crate
    assert "Permission is hereby granted" in text
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text
    for dev_only in ("proptest ", "insta ", "loom "):
        assert f"\n- {dev_only}" not in text, dev_only


def test_the_installed_package_has_its_licences() -> None:
    installed = {path.name: path for path in files("manylora") or [] if "licenses" in path.parts}
    for name in ("LICENSE", "NOTICE", NOTICES):
        assert name in installed, f"{name} of {sorted(installed)}"
        wanted = (ROOT / name).read_text(encoding="utf-8")
        assert Path(str(installed[name].locate())).read_text(encoding="utf-8") == wanted, name
