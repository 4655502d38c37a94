"""Text for Megatron-LM's tools/preprocess_data.py and NullTokenizer, whose tokens are numbers: a byte each.

    python prepare_text.py OUT.jsonl [FILE ...]

Without files the text is the sources of a few modules of Python's standard library.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

MODULES = ("argparse", "ast", "collections/__init__", "datetime", "difflib", "inspect", "typing", "zipfile")
BYTES = 256  # what --vocab-size has to be


def standard_library() -> list[Path]:
    """The modules that this Python has as files: a package in one version is a module in another."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path for name in MODULES if (path := folder / f"{name}.py").is_file()]


def main() -> None:
    out, *files = sys.argv[1:]
    with open(out, "w", encoding="utf-8") as lines:
        for path in map(Path, files) if files else standard_library():
            lines.write(json.dumps({"text": " ".join(map(str, path.read_bytes()))}) + "\n")


if __name__ == "__main__":
    main()
