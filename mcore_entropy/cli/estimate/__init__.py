"""What `mcore-entropy estimate` knows: memory and products of the head's three forms, from shapes alone."""
