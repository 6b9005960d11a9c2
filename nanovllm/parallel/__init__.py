"""Where the ranks run: in this process, or each in a separate process."""
