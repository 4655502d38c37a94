"""The head's shape out of a Hugging Face model's config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
_DTYPE = ("dtype", "torch_dtype")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class ModelShape:
    """What a config says; `dtype` is bf16, fp16, fp32, or None where it says nothing."""

    hidden_size: int
    vocab_size: int
    dtype: str | None


def read_shape(path: Path) -> ModelShape:
    """From the file, or from the config.json of a folder. A multimodal model's text part is taken.

    Raises:
        ValueError: it cannot be read, or does not say what is needed.
    """
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config: cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"config: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"config: expected a JSON object in {path}, got a {type(config).__name__}")
    return ModelShape(
        _size(config, _HIDDEN_SIZE, path), _size(config, ("vocab_size",), path), _dtype(config, path)
    )


def _values(config: dict[str, Any], names: tuple[str, ...]) -> Iterator[Any]:
    """What the text part, and then the whole, says under any of the names."""
    text = config.get("text_config")
    for part in (text, config) if isinstance(text, dict) else (config,):
        for name in names:
            if part.get(name) is not None:
                yield part[name]


def _size(config: dict[str, Any], names: tuple[str, ...], path: Path) -> int:
    value = next(_values(config, names), None)
    if value is None:
        raise ValueError(
            f"config: {path} has no {' or '.join(names)}, at the top or in text_config; give "
            "--hidden-size and --vocab-size instead"
        )
    if type(value) is not int or value < 1:
        raise ValueError(f"config: expected a positive {names[0]} in {path}, got {value!r}")
    return value


def _dtype(config: dict[str, Any], path: Path) -> str | None:
    value = next(_values(config, _DTYPE), None)
    if value is None:
        return None
    name = _DTYPES.get(str(value).removeprefix("torch."))
    if name is None:
        raise ValueError(
            f"config: expected {', '.join(_DTYPES)} as the dtype in {path}, got {value!r}; give --dtype"
        )
    return name
