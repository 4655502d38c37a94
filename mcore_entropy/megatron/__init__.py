"""Megatron-core: the entropy-aware output layer, its configuration and swap, and Megatron on a CPU."""
