"""Files of a model, from the hub or a directory: nothing in them is trusted."""
