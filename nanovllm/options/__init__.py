"""What users set, and the checks of it: engine options, sampling parameters, flags."""
