"""What the data say about the weights."""
