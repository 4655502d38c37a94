"""The same math outside Megatron-core: Hugging Face models, FSDP, DTensor."""
