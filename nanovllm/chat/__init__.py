"""Conversations to prompts, and answers to their parts: templates, tools, reasoning."""
