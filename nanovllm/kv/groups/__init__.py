"""What each kind of layer keeps of a sequence in the pages of the pool."""
