"""Rewards: the built-in ones, calling the user's own safely, votes, the reward check."""
