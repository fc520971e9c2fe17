"""Mean and variance through torch functions: a tensor that carries both, and the rules that move them on."""
