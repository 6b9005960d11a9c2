"""The command line: generate, chat, run, serve, explain, batch, models, prove, learn and lab."""
