"""How posteriors are found."""
