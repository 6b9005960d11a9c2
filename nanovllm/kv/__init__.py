"""The KV pool: which sequence owns which page, and what the prefix cache holds. No tensors."""
