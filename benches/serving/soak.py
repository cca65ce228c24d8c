"""The soak test for as long as one likes: `python benches/serving/soak.py --seconds 300`, result as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from serving.conftest import Server, server_flags
from serving.soak import Soak, flags, make_contents


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contents, base = make_contents(folder)
        server = Server(server_flags(*flags(folder)), folder, {"MANYLORA_ALLOW_RUNTIME_LORA_UPDATING": "1"})
        try:
            result = Soak(server, contents, base, arguments.seed).run(arguments.seconds, arguments.clients)
        finally:
            server.close()
    print(json.dumps(result, indent=1))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
