"""The command line: generate, chat, serve, batch and models."""
