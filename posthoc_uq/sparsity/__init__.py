"""What posteriors say of which weights a network needs: the median model, densities, inclusion probabilities."""
