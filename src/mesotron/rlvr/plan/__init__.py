"""What a run needs and costs, before it starts."""
