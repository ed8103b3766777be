"""Saves and restores of training runs: `remanent.torch.Checkpointer` and its parts."""
