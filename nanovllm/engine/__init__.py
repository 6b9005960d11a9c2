"""Owns the requests, from text to text, and drives the scheduler and the executor."""
