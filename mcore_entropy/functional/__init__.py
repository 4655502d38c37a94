"""The autograd Functions and the public functions on them."""
