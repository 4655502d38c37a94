"""Megatron-core: the entropy-aware output layer, its swap, arguments, loss, and Megatron on CPU."""
