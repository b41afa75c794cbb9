"""Reinforcement learning from verifiable rewards, on TRL; `trainer.py` is the place to start.

Nothing heavy is imported here.
"""
