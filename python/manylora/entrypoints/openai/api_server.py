"""`python -m manylora.entrypoints.openai.api_server --model BASE ...` is `manylora serve BASE ...`."""

import sys
from collections.abc import Sequence

from manylora import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve, and return the exit status."""
    return cli.main(["serve", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
