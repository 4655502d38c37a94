"""Beside MindSpeed, which rewrites Megatron-core while it runs: it has to have done so first.

Importing ``mindspeed.megatron_adaptor`` replaces functions, methods and classes of Megatron, in every module
that imported them. Our layer derives from Megatron's: derived before, it would keep the class that MindSpeed
has replaced since, and with it whatever MindSpeed does there would be lost without a word. Of what MindSpeed
replaces, the swap calls nothing but the layer and the model themselves; of Megatron's cross entropy nothing.
"""

from __future__ import annotations

import sys

ADAPTOR = "mindspeed.megatron_adaptor"


def _adaptor_is_loaded() -> bool:
    return ADAPTOR in sys.modules


_was_first = _adaptor_is_loaded()  # when our layer was derived from Megatron's, or just before


def check_import_order() -> None:
    """Raise ValueError if MindSpeed has rewritten Megatron after our layer was derived from it."""
    if _adaptor_is_loaded() and not _was_first:
        raise ValueError(
            f"MindSpeed: expected {ADAPTOR} to be imported before mcore_entropy.megatron, got it afterwards; "
            "import it first in the program, and what it changes in Megatron is in our layer as well"
        )
