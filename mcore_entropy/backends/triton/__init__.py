"""The Triton backend: one read of given logits, and a fused head whose logits never reach memory."""
