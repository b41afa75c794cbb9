"""Checkpoints that are whole, hold no pickle and continue to the bit."""
