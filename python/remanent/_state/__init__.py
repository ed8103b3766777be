"""State as pages and plain values: trees, modules, optimizers, random number generators and user-defined types."""
