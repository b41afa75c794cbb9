"""Objectives: the losses, and where self-labelled training takes its labels from.

Each file is one idea, without a trainer: `mesotron.rlvr.trainer` puts them together.
"""
