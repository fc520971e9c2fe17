"""The library on real input: ``python -m posthoc_uq.cli.demo`` (needs the ``demo`` extra).

Two parts. ``digits`` trains a small network, fits and tunes a posterior, saves it, loads it in a fresh
process and measures what it buys. ``photos`` takes an ImageNet classifier as it is and shows what it does
not know.
"""
