"""``python -m posthoc_uq``: the command line."""

from posthoc_uq.cli import main

if __name__ == "__main__":
    main()
