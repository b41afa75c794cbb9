"""One file for each built-in reward; its name is the reward's."""
