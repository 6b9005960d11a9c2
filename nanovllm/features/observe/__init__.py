"""What an engine tells of itself: a trace of its steps, and its numbers."""
