"""What `mcore-entropy benchmark` does: heads on one machine, checked against fp64, then timed in turn.

Legend of the folder: N tokens, V whole vocabulary, H hidden size, R ranks that share the vocabulary.
"""
