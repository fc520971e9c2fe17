"""How posteriors predict: one file per head, and the prediction objects that all of them return."""
