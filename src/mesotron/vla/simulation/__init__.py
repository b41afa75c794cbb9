"""Simulation in processes of its own, and episodes of many worlds side by side."""
