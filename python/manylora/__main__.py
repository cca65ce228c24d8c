"""`python -m manylora` is the command `manylora`."""

import sys

from manylora.cli import main

if __name__ == "__main__":
    sys.exit(main())
