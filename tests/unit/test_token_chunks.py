"""How tokens are cut into chunks, and what a chunk hands to kernels.

Legend: N tokens, cut into sections under sequence parallelism.
"""

from __future__ import annotations

import pytest
import torch

from mcore_entropy.parallel import token_chunks


@pytest.mark.parametrize("sections", [1, 2, 3])
@pytest.mark.parametrize("chunk_size", [1, 4, 7, 100])
def test_take_is_contiguous_and_put_is_its_reverse(sections: int, chunk_size: int) -> None:
    """A chunk of one row of every section too, whose view has the stride of a section."""
    tokens = 21 * sections
    per_token = torch.arange(tokens)
    copy = torch.full_like(per_token, -1)
    chunks = list(token_chunks(tokens, chunk_size, sections))
    for chunk in chunks:
        taken = chunk.take(per_token)
        assert taken.shape == (chunk.tokens,) and taken.is_contiguous() and taken.stride() == (1,)
        chunk.put(copy, taken)
    assert torch.equal(copy, per_token)
    assert [chunk.following() for chunk in chunks] == [*chunks[1:], None]
