"""What is done with a finished model: export and chat."""
