"""Outputs in the documents are what the commands print now."""

from __future__ import annotations

import pytest

from tests.docs.commands import CommandFailed, output_of
from tests.docs.outputs import difference, written
from tests.docs.pages import Block, blocks, pages

OUTPUTS = [block for page in pages() for block in blocks(page) if block.kind == "output"]


@pytest.mark.parametrize("block", OUTPUTS, ids=str)
def test_outputs_are_what_the_commands_print(block: Block) -> None:
    found = difference(block)
    assert not found, f"\n{found}\n\npython -m tests.docs.outputs --write {block.page} writes it anew"


PAGE = """\
<!-- output: first -->

```text
old
older
```

words

<!-- recorded: second -->
```
```
<!-- not run: third -->
```python
code
```
"""


def test_writing_changes_these_blocks_alone() -> None:
    new = written("PAGE.md", PAGE, lambda command: f"{command}\nran\n")
    assert new == PAGE.replace("old\nolder", "first\nran").replace("```\n```\n", "```\nsecond\nran\n```\n")
    assert written("PAGE.md", new, lambda command: f"{command}\nran\n") == new


def test_writing_one_kind() -> None:
    new = written("PAGE.md", PAGE, lambda command: "ran\n", ("output",))
    assert new == PAGE.replace("old\nolder", "ran")


def test_a_difference_is_shown() -> None:
    block = Block("CHANGELOG.md", 3, "text", None, "output", "python -c 'print(1 + 1)'", "3\n")
    assert difference(block).splitlines()[-2:] == ["-3", "+2"]


def test_a_command_that_fails_is_no_output() -> None:
    with pytest.raises(CommandFailed, match=r"exit code 3(?s:.*)because"):
        output_of("python -c 'import sys; print(\"because\", file=sys.stderr); sys.exit(3)'")
