"""Posteriors that are trained, one file a method, with their blocks and the loop that all share.

Nothing of it is imported before it is asked for: `posthoc_uq.methods` and `posthoc_uq.posteriors` have its names.
"""
