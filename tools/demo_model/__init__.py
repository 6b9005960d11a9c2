"""Trains the demo model: the questions that it learns, its tokenizer, and the training."""
