"""Conversations to prompts: messages, tools and chat templates."""
