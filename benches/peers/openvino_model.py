"""Exports the base model for OpenVINO, with f16 weights, which hold the model's bf16 ones."""

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Export the model, unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.target.exists():
        return
    part = arguments.target.with_suffix(".part")
    exporter = str(Path(sys.executable).with_name("optimum-cli"))
    options = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
    subprocess.run([exporter, "export", "openvino", "--model", str(arguments.base), *options, str(part)], check=True)
    part.rename(arguments.target)


if __name__ == "__main__":
    main()
