"""A task with many right answers: write a number as a sum of two to four digits.

    prompt "12="    answers "3+9\\n", "9+3\\n", "2+2+8\\n", "1+3+3+5\\n", ...    reward 1 if right, else 0

The reward is computed. A policy that always writes the same right sum earns as much as one that knows many,
which is why the entropy tells something here. Tokens are bytes; n rows of LENGTH tokens.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

VOCABULARY = 256
PADDING = 0
END = ord("\n")
PROMPT_LENGTH = len("12=")
ANSWER_LENGTH = len("1+2+3+4\n")
LENGTH = PROMPT_LENGTH + ANSWER_LENGTH
NUMBERS = range(5, 30)  # each has at least 14 right answers

_SUM = re.compile(rb"[1-9](\+[1-9]){1,3}\n")


def prompts(number: int, generator: torch.Generator) -> Tensor:
    """[number, PROMPT_LENGTH] tokens."""
    chosen = torch.randint(NUMBERS.start, NUMBERS.stop, (number,), generator=generator)
    return torch.tensor([list(b"%02d=" % value) for value in chosen.tolist()])


def examples(number: int, generator: torch.Generator) -> Tensor:
    """[number, LENGTH] tokens of solved problems: random digits, and before them what they add up to."""
    rows = []
    while len(rows) < number:
        terms = int(torch.randint(2, 5, (), generator=generator))
        digits = torch.randint(1, 10, (terms,), generator=generator).tolist()
        if sum(digits) in NUMBERS:
            text = b"%02d=" % sum(digits) + b"+".join(b"%d" % digit for digit in digits) + b"\n"
            rows.append(list(text.ljust(LENGTH, bytes([PADDING]))))
    return torch.tensor(rows)


def reward(prompt: bytes, answer: bytes) -> float:
    """1 for a sum of two to four digits from 1 to 9, with its end of line, that is the number; else 0."""
    if not _SUM.fullmatch(answer):
        return 0.0
    return float(sum(map(int, answer.split(b"+"))) == int(prompt.removesuffix(b"=")))


def answers(tokens: Tensor) -> list[bytes]:
    """Of rows [n, LENGTH]: up to and with the end of the line, or all that was written."""
    written = [bytes(row)[PROMPT_LENGTH:] for row in tokens.tolist()]
    return [answer[: answer.find(b"\n") + 1] if b"\n" in answer else answer for answer in written]


def rewards(tokens: Tensor) -> Tensor:
    """The reward of each row, [n, LENGTH] to [n], on the CPU."""
    promised = [bytes(row)[:PROMPT_LENGTH] for row in tokens.tolist()]
    return torch.tensor([reward(*pair) for pair in zip(promised, answers(tokens), strict=True)])


def answer_mask(tokens: Tensor) -> Tensor:
    """bool, of the shape of the tokens: True for the answer, its end of line included."""
    ends = tokens == END
    before_or_at_end = ends.cumsum(-1) - ends.long() == 0
    before_or_at_end[:, :PROMPT_LENGTH] = False
    return before_or_at_end
