"""``python -m posthoc_uq``: the command line."""

import sys

from posthoc_uq.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
