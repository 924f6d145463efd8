"""Checkpoints in stock Megatron's layout of tensors, whatever the degrees (design section 5)."""
