"""Pictures: from files to embeddings, and what requests, the scheduler and ranks know of them."""
