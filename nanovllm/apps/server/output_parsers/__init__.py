"""A model's text to the parts of an answer: text, reasoning and tool calls."""
