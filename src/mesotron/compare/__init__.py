"""Fair comparisons of optimizers (`mesotron compare`) and sweeps (`mesotron compare sweep`)."""
