"""What stands on `LLM` and `AsyncLLM`: each folder is one application, and can be deleted."""
