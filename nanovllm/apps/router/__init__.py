"""Several models in one server: an engine in a process for each, behind one address."""
