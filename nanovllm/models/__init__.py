"""Model families, one file each, found by the architecture that config.json names."""
