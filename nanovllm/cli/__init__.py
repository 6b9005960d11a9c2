"""The command line: generate, chat, serve and bench serve."""
