"""Environments by name, one file for each kind; `tasks.environment` says what one is."""
