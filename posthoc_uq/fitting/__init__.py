"""What a user calls: fit, tune, update, wrap."""
