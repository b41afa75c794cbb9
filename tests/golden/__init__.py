"""References that show whether a change altered a number, a flag, a help page or a verdict."""
