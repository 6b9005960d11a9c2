"""`nanovllm learn`: the course of docs/course in the terminal."""
