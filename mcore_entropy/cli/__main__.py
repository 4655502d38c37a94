"""``python -m mcore_entropy.cli``: the same as the command ``mcore-entropy``."""

from mcore_entropy.cli import main

main()
