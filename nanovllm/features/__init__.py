"""What an engine may have: each folder is one feature, whole, on one seam, and can be deleted."""
