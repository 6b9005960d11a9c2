"""Programs for those who work on nanovllm; the package does not need them."""
