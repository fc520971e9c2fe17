"""Errors, options, batches, outputs, copies of models, random numbers, devices, processes."""
