"""Evaluations: greedy and sampled scores with intervals, and their comparison."""
