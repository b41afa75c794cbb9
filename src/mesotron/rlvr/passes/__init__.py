"""Training passes over packed rows and recorded graphs."""
