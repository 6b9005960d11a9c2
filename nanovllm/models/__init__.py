"""Model families: registry.py finds the file that config.json names, decoder.py is their base."""
