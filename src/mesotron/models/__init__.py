"""Loading and saving of models, adapters and the tiny model."""
