"""Model families, one file each. config.json names the architecture, registry.py finds the file."""
