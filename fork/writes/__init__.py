"""The static check of writes past the weight loader: what `fork.check_writes` asks."""
