"""What the parts of an engine say to each other: plain values, without torch."""
