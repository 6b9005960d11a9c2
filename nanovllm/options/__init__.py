"""What users set, and how it is checked: engine options, sampling parameters, flags."""
