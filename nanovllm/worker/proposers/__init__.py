"""What proposes draft tokens: one file for each method, all with the interface of proposer.py."""
