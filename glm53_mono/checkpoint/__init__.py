"""Synthetic checkpoints: configs of any depth and width, and the tensors that such a checkpoint holds."""
