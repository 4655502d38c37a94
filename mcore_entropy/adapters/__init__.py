"""The same computation for frameworks other than Megatron-core; each module imports only its own."""
