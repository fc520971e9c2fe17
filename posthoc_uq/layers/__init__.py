"""Which weights are used where; activations and gradients caught, and checked against autograd."""
