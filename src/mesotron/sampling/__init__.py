"""Decoding: one sampler for rollouts, evaluation and chat."""
