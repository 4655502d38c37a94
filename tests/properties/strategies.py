"""What is drawn: a `Case`, over all that the library promises."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from tests.properties.case import Case
from tests.reference import METRICS

FORMS_OF_LOGITS = ("entropy", "chunks", "both")
DTYPES = ("float64", "float32", "bfloat16", "float16")

# Kinds of a row of logits. "extreme": 0 and ± 2^k up to 2^100; "ties": only two different numbers.
LOGIT_ROWS = ("plain", "wide", "offset", "flat", "close", "peaked", "ties", "tiny", "extreme")
LOGIT_ROWS_WITH_INFINITIES = ("some -inf", "one alive", "lowest")
LOGIT_ROWS_BAD = ("all -inf", "one nan", "one +inf", "nan and -inf")
# Kinds of a row of hidden states.
HIDDEN_ROWS = ("plain", "wide", "zero", "tiny")
HIDDEN_ROWS_BAD = ("one nan", "one +inf", "one -inf")

LAYOUTS = (
    "contiguous",
    "transposed",
    "column major",
    "offset view",
    "every other column",
    "one row expanded",
)
NUMBERS = (1.0, 0.5, 2.0, 0.7, 1.3, 0.05, 50.0, "0-dim")
PER_TOKEN = ("spread", "powers of two", "with bad ones", "of another dtype")


def _some(draw: st.DrawFn, kinds: tuple[str, ...], rare: tuple[str, ...] = ()) -> tuple[str, ...]:
    """One to four kinds in a circle, with rare ones in one case out of three."""
    choice = kinds + (rare if draw(st.integers(0, 2)) == 2 else ())
    return tuple(draw(st.lists(st.sampled_from(choice), min_size=1, max_size=4)))


@st.composite
def _shards(draw: st.DrawFn, ranks: int) -> tuple[tuple[int, ...], bool]:
    """Columns of every rank, and whether they have to be told; a rank may have none."""
    if ranks == 1:
        return (draw(st.integers(1, 70)),), draw(st.booleans())
    if draw(st.booleans()):
        return (draw(st.integers(1, 70 // ranks)),) * ranks, draw(st.booleans())
    columns = draw(st.integers(1, 70))
    cuts = sorted(draw(st.lists(st.integers(0, columns), min_size=ranks - 1, max_size=ranks - 1)))
    edges = [0, *cuts, columns]
    return tuple(b - a for a, b in pairwise(edges)), True


@st.composite
def _lead(draw: st.DrawFn, many: bool) -> tuple[int, ...]:
    """[N], [b, s] or [s, b], a scalar, no token; or enough for several tiles of the smallest workspace."""
    if many and draw(st.integers(0, 15)) == 15:
        return draw(st.sampled_from([(700,), (1400,), (350, 4)]))
    dimensions = draw(st.integers(0, 3))
    return tuple(draw(st.integers(0, 5 if dimensions > 1 else 12)) for _ in range(dimensions))


@st.composite
def _upstream(draw: st.DrawFn) -> str:
    return draw(
        st.sampled_from(["random", "random", "some zero", "zero", "one expanded", "row expanded", "none"])
    )


@st.composite
def cases(draw: st.DrawFn, forms: tuple[str, ...], ranks: int = 1, many: bool = True) -> Case:
    """A call on `ranks` ranks, over all that DESIGN promises."""
    form = draw(st.sampled_from(forms))
    head = form == "linear"
    dtype = draw(st.sampled_from(DTYPES))
    shards, explicit = draw(_shards(ranks))
    columns = sum(shards)
    vocab_size = columns if explicit or draw(st.booleans()) else None
    if vocab_size is not None and draw(st.booleans()):
        vocab_size = draw(st.integers(1, columns))
    lead = draw(_lead(many))
    sequence_parallel = head and draw(st.booleans())
    if sequence_parallel and ranks > 1:
        lead = (ranks * draw(st.integers(0, 3)), *lead[1:])
    log_probs = form in ("both", "linear")
    entropy = not log_probs or draw(st.integers(0, 3)) < 3
    number = draw(st.sampled_from(NUMBERS))
    rows = _some(draw, HIDDEN_ROWS, HIDDEN_ROWS_BAD)
    if not head:
        usual = LOGIT_ROWS if draw(st.booleans()) else LOGIT_ROWS + LOGIT_ROWS_WITH_INFINITIES
        rows = _some(draw, usual, LOGIT_ROWS_BAD)
    of_head = {}
    if head:
        of_head = dict(
            width=draw(st.integers(1, 16)),
            bias=draw(st.sampled_from(["none", "plain", "offset", "some -inf"])),
            bias_dtype=draw(st.sampled_from([None, None, *DTYPES])),
            scale=draw(st.sampled_from([1.0, 1.0, 0.25, 3.0])),
            softcap=draw(st.sampled_from([None, None, 5.0, 30.0])),
            autocast=draw(st.integers(0, 7)) == 7,
            sequence_parallel=sequence_parallel,
            trained=tuple(sorted(draw(st.sets(st.sampled_from(["bias", "hidden", "weight"]), min_size=1)))),
        )
    return Case(
        form=form,
        lead=lead,
        shards=shards,
        seed=draw(st.integers(0, 2**20)),
        dtype=dtype,
        vocab_size=vocab_size,
        explicit_shards=explicit,
        rows=rows,
        targets=_some(draw, ("any", "any", "first", "last"), ("ignored", "least likely")),
        target_dtype=draw(st.sampled_from(["int64", "int64", "int32", "int16", "int8", "uint8"])),
        ignore_index=draw(st.sampled_from([-100, -100, -1, 0, 3])),
        layout=draw(st.sampled_from(LAYOUTS)),
        other_layout=draw(st.sampled_from(LAYOUTS)),
        temperature=draw(st.sampled_from(PER_TOKEN)) if draw(st.integers(0, 2)) == 2 else number,
        mask=draw(st.sampled_from(["none", "none", "random", "random", "all True", "all False", "expanded"])),
        upstream=(draw(_upstream()), draw(_upstream())),
        upstream_scale=draw(st.sampled_from([1.0, 1.0, 1e-4, 100.0])),
        entropy=entropy,
        metrics=tuple(sorted(draw(st.sets(st.sampled_from(METRICS)))))
        if log_probs and draw(st.booleans())
        else (),
        chunk_size=draw(st.sampled_from([1, 2, 3, 5, 8, 100]))
        if form != "entropy" and draw(st.booleans())
        else None,
        workspace=draw(st.sampled_from([None, 1])),
        compact_rows=draw(st.booleans()),
        **of_head,
    )
