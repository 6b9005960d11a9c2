"""What every tensor tier may use: checkpoint files, weight loading, the tensor-parallel group."""
