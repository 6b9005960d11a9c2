"""The command line: generate, chat, serve, batch, models and prove."""
