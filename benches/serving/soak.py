"""The soak test for as long as one likes: `python benches/serving/soak.py --seconds 300`, result as JSON.

What follows `--` are more flags of the server, such as `-- --max-cpu-loras 6`.
"""

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--churners", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="more flags of the server")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contents, base = make_contents(folder)
        given = server_flags(*flags(folder), *arguments.flags)
        server = Server(given, folder, {"MANYLORA_ALLOW_RUNTIME_LORA_UPDATING": "1"})
        try:
            soak = Soak(server, contents, base, arguments.seed)
            result = soak.run(arguments.seconds, arguments.clients, arguments.churners)
        finally:
            server.close()
    print(json.dumps(result, indent=1))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
