"""Follows requests from prompt to output; drives the scheduler and the executor."""
