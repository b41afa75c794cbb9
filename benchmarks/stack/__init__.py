"""Mesotron and TRL with and without vLLM: seconds per GRPO step, accuracy, mismatch, QLoRA."""
