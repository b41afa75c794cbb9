"""Benchmarks: an optimizer's step, a small language model, Snake, and the speed of PPO.

Each is a command (`mesotron bench optim`, `train`, `snake`, `ppo`); their results and what did not
work are kept in benchmarks/ at the root of the repository. `crew` and `mps` are what the studies
there share: processes side by side on one GPU.
"""
