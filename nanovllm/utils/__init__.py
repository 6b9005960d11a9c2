"""What the rest shares: ranks, memory, processes, files of the user, progress, the terminal."""
