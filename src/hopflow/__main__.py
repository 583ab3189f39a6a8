"""`python -m hopflow`: the command `hopflow`."""

import sys

from hopflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
