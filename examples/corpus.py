"""Real text as a row of tokens: the files, a byte-pair tokenizer trained on them, both kept for the next run.

Without `--data` the text is the Python standard library's own sources: every machine that runs this has them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import launch
import torch
from launch import UserMistake, World

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # special tokens come first
MIB = 2**20
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
NOT_PROSE = {"encodings", "pydoc_data"}  # tables of characters, and one huge literal


@dataclass(frozen=True)
class Corpus:
    """One long row of token ids: the documents in order, each followed by END_OF_TEXT_ID."""

    tokens: torch.Tensor
    tokenizer_json: str
    summary: str

    def windows(self, seq_length: int) -> int:
        """How many samples there are of `seq_length` inputs and as many labels, one place further on."""
        return max(0, len(self.tokens) - 1) // seq_length

    def batches(
        self, *, seq_length: int, batch_size: int, seed: int, iterations: int
    ) -> Iterator[torch.Tensor]:
        """Yields token ids [batch_size, seq_length + 1]: all windows in a shuffled order, then shuffled anew.

        The order depends on the arguments alone: every rank computes it and takes its own rows.
        """
        windows, generator = self.windows(seq_length), torch.Generator().manual_seed(seed)
        offsets, order = torch.arange(seq_length + 1), torch.empty(0, dtype=torch.long)
        for _ in range(iterations):
            while len(order) < batch_size:
                order = torch.cat([order, torch.randperm(windows, generator=generator)])
            chosen, order = order[:batch_size], order[batch_size:]
            yield self.tokens[chosen[:, None] * seq_length + offsets].long()


def check_vocab_size(args: argparse.Namespace) -> None:
    """Raises `UserMistake` for a --vocab-size that a byte-level tokenizer cannot have."""
    if args.vocab_size < 257:
        raise UserMistake(
            f"--vocab-size {args.vocab_size} is too small: 256 bytes and the end of text need 257."
        )


def load_for_all(args: argparse.Namespace, world: World) -> Corpus:
    """Rank 0 reads and tokenizes, and the others are sent the tokens: no file system has to be shared."""

    def read() -> Corpus:
        launch.make_folder(args.save, "save")
        text = load(args.data, vocab_size=args.vocab_size, max_mib=args.max_data_mib, cache=args.cache_dir)
        windows = text.windows(args.seq_length)
        if windows < args.global_batch_size:
            raise UserMistake(
                f"the text is too short: {len(text.tokens):,} tokens are {windows} sample(s) of "
                f"--seq-length {args.seq_length}, and one iteration takes {args.global_batch_size}."
            )
        return text

    return world.from_rank_zero(read)


def load(files: Sequence[str] | None, *, vocab_size: int, max_mib: float, cache: Path) -> Corpus:
    """Reads the text, and the tokens that an earlier run made of it or makes them. For one process alone."""
    documents, size, cut = read_documents(files, max_bytes=int(max_mib * MIB))
    digest = hashlib.sha256(f"1 {vocab_size} {END_OF_TEXT}".encode())
    for document in documents:
        digest.update(document.encode() + b"\0")
    kept = cache / digest.hexdigest()[:24]
    known = kept.is_dir()
    if not known:
        keep(kept, *tokenize(documents, vocab_size))
    tokens = torch.load(kept / "tokens.pt", weights_only=True)
    source = f"{len(documents)} file(s)" + (" of the Python standard library" if files is None else "")
    limit = f" (--max-data-mib {max_mib:g} leaves out the rest)" if cut else ""
    summary = (
        f"{source}, {size / MIB:.1f} MiB{limit}, {len(tokens):,} tokens, "
        f"tokenizer {'from' if known else 'trained now, kept in'} {kept}"
    )
    return Corpus(tokens, (kept / "tokenizer.json").read_text(encoding="utf-8"), summary)


def read_documents(files: Sequence[str] | None, *, max_bytes: int) -> tuple[list[str], int, bool]:
    """The text of the files in order, its size in bytes, and whether `max_bytes` left something out."""
    paths = standard_library() if files is None else [Path(file) for file in files]
    documents: list[str] = []
    size = 0
    for path in paths:
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise UserMistake(f"--data: cannot read {path}: {error.strerror}.") from None
        taken = raw[: max_bytes - size]
        if taken:
            documents.append(taken.decode("utf-8", errors="replace"))
            size += len(taken)
        if len(taken) < len(raw):
            return documents, size, True
    return documents, size, False


def standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    left_out = NOT_THE_LIBRARY | NOT_PROSE
    sources = (path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))
    return sorted(sources, key=lambda path: path.relative_to(root).as_posix())


def tokenize(documents: Sequence[str], vocab_size: int) -> tuple[str, torch.Tensor]:
    """Trains a byte-level BPE tokenizer (every byte is a token, nothing is unknown), and applies it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(documents)):
        ids.extend(encoding.ids)
        ids.append(END_OF_TEXT_ID)
    return tokenizer.to_str(), torch.tensor(ids, dtype=torch.int32)


def keep(kept: Path, tokenizer_json: str, tokens: torch.Tensor) -> None:
    """Writes the folder under another name and renames it, so that another run sees all of it or nothing."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{kept.name}.", dir=kept.parent))
    except OSError as error:
        raise UserMistake(f"--cache-dir: cannot write to {kept.parent}: {error.strerror}.") from None
    try:
        (draft / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        torch.save(tokens, draft / "tokens.pt")
        os.replace(draft, kept)
    except OSError:
        if not kept.is_dir():  # otherwise another run was faster, with the same content
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mcore-entropy"
