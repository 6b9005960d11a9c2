"""Runs the scheduler's steps: processes, device tables, the model runner, graphs and sampling."""
