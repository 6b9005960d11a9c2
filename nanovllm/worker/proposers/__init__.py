"""Proposers: what guesses the next tokens of a row, for the model to verify."""
