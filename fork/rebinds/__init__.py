"""Find the tensors that a layer keeps a second copy of, and that a weight update may leave behind."""
