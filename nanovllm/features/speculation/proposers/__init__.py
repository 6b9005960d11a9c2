"""What proposes drafts, on the device."""
