"""How long `make soak` draws."""

import os
from typing import Final

SOAK: Final = int(os.environ.get("SOAK", "4"))
"""What the tests marked `soak` draw is proportional to it: 10 before a release."""
