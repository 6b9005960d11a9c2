"""Runs the steps that the scheduler decides: processes, device tables, the model, sampling."""
