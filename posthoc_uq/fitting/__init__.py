"""What a user calls: fit, tune, calibrate, update, wrap; `posthoc_uq` offers them, each from its file."""
