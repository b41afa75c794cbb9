"""Reinforcement learning from verifiable rewards, on TRL: tasks, answers, rewards, objectives.

Nothing heavy is imported here; each file of the room is imported by its own name.
"""
