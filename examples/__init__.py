"""Scripts that show the library at work; each says how to run it."""
