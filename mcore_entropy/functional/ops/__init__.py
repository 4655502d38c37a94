"""The public functions as registered ops, which is what `torch.compile` sees of them (decision 6)."""
