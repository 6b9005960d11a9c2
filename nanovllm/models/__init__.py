"""Model families: registry.py finds the file for a config.json, decoder.py is their base."""
