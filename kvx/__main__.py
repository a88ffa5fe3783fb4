"""``python -m kvx`` is ``kvx``."""

import sys

from kvx.cli import main

if __name__ == "__main__":
    sys.exit(main())
