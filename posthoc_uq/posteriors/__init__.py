"""What a posterior over the weights is."""
