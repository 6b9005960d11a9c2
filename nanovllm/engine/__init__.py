"""The engine: scheduling (no torch), the worker that runs the model, and the loop that joins
them.
"""
