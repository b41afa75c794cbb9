"""The layers that our trainer puts over TRL's, one idea each, and what they compute with."""
