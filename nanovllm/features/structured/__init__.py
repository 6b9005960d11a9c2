"""Structured outputs: grammars, and the masks that they lay over logits."""
