"""The arguments of the public functions, checked before any collective and brought into one form.

Every error is a ValueError that says what was expected, what came, and where a cause is likely.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_entropy.backends.interface import RowInputs
from mcore_entropy.execution import Execution
from mcore_entropy.parallel import VocabShard, checks_enabled
from mcore_entropy.statistics import LogitTransform, positive_or_nan, statistics_dtype

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_bool(name: str, value: object) -> None:
    """Raise ValueError unless this is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {value!r}")


@dataclass(frozen=True)
class TokenArguments:
    """What is given per token, flattened over the leading dimensions to [N].

    Attributes:
        target: int64, or None when only the entropy is wanted.
        mask: bool; False rows are left out.
        temperature: a number above 0, or [N] in the dtype of the statistics with NaN for values <= 0.
        ignore_index: the target that stands for "no log-prob here".
    """

    target: Tensor | None
    mask: Tensor | None
    temperature: float | Tensor
    ignore_index: int

    @staticmethod
    def checked(
        target: Tensor | None,
        mask: Tensor | None,
        temperature: float | Tensor,
        ignore_index: int,
        *,
        shape: torch.Size,
        shape_source: str,
        device: torch.device,
        dtype: torch.dtype,
        vocab_size: int,
    ) -> TokenArguments:
        """Check the arguments against the leading shape and device of the logits or hidden states.

        `shape_source` tells the caller in an error where the expected shape comes from.

        Raises:
            ValueError: a shape, dtype, device or value does not fit.
        """
        if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
            raise ValueError(f"ignore_index: expected an int, got {ignore_index!r}")
        if not -(2**63) <= ignore_index < 2**63:
            raise ValueError(f"ignore_index: expected an int of 64 bits, got {ignore_index}")
        if target is not None:
            check_tensor("target", target, _INTEGERS, device)
            _check_shape("target", target, shape, shape_source)
            target = target.reshape(-1).long()
        if mask is not None:
            hint = "; Megatron's loss_mask is a float tensor: pass loss_mask.bool()"
            check_tensor("mask", mask, (torch.bool,), device, hint)
            _check_shape("mask", mask, shape, shape_source)
            mask = mask.reshape(-1)
        if isinstance(temperature, Tensor):
            temperature = _checked_temperature(temperature, shape, shape_source, device, dtype)
        else:
            temperature = checked_temperature_number(temperature)
        arguments = TokenArguments(target, mask, temperature, ignore_index)
        if device.type == "cpu" or checks_enabled():
            arguments._check_target_range(vocab_size)
        return arguments

    def ignored(self) -> Tensor:
        """[N] bool: tokens without a target."""
        assert self.target is not None
        return self.target == self.ignore_index

    def invalid(self, vocab_size: int) -> Tensor:
        """[N] bool: tokens whose target is neither in the vocabulary nor ignored."""
        assert self.target is not None
        return ((self.target < 0) | (self.target >= vocab_size)) & ~self.ignored()

    def row_inputs(self, shard: VocabShard, transform: LogitTransform | None) -> RowInputs:
        """What all N rows bring along to a backend that holds `shard`."""
        if self.target is None:
            return RowInputs(None, self.temperature, transform)
        column = self.target - shard.start
        here = (column >= 0) & (column < shard.counted) & ~self.ignored()
        return RowInputs(torch.where(here, column, -1), self.temperature, transform)

    def _check_target_range(self, vocab_size: int) -> None:
        if self.target is None or self.target.device.type == "meta":
            return
        bad = self.invalid(vocab_size)
        if self.mask is not None:
            bad &= self.mask
        if bad.any():
            where = int(bad.nonzero()[0, 0])
            raise ValueError(
                f"target: expected values in [0, {vocab_size}) or ignore_index = {self.ignore_index}, got "
                f"{int(self.target[where])} at token {where} ({int(bad.sum())} such tokens); labels are "
                "global vocabulary indices, and padding needs ignore_index or a mask"
            )


def checked_temperature_number(temperature: object) -> float:
    """A temperature that is no tensor, if it is a positive, finite number."""
    if not isinstance(temperature, (int, float)) or isinstance(temperature, bool):
        raise ValueError(f"temperature: expected a number or a tensor with one a token, got {temperature!r}")
    fp32 = torch.finfo(torch.float32)
    if not fp32.tiny <= temperature <= fp32.max:  # also holds for NaN, and for ints beyond every float
        raise ValueError(f"temperature: expected a positive, finite number in fp32, got {temperature}")
    return float(temperature)


def _checked_temperature(
    temperature: Tensor, shape: torch.Size, shape_source: str, device: torch.device, dtype: torch.dtype
) -> Tensor:
    check_tensor("temperature", temperature, FLOATS, device)
    if temperature.requires_grad:
        raise ValueError(
            "temperature: expected a tensor that needs no gradient, got one with requires_grad=True; none "
            "is computed for it, so detach it"
        )
    if temperature.dim() == 0:
        temperature = temperature.expand(shape)
    _check_shape("temperature", temperature, shape, shape_source)
    return positive_or_nan(temperature.reshape(-1).to(statistics_dtype(dtype)))


def check_tensor(
    name: str, value: object, dtypes: tuple[torch.dtype, ...], device: torch.device | None, hint: str = ""
) -> None:
    """Raise ValueError unless `value` is a plain tensor of one of the dtypes, on the device if given."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
    if hasattr(value, "full_tensor"):
        raise ValueError(
            f"{name}: expected a plain tensor, got a {type(value).__name__} of placements "
            f"{getattr(value, 'placements', None)}; pass its local shard with the group it is sharded over, "
            "or the DTensor to mcore_entropy.adapters.dtensor: dtensor_log_probs_and_entropy and "
            "dtensor_entropy take logits, dtensor_linear_log_probs_and_entropy takes a head's weight"
        )
    if value.is_nested:
        raise ValueError(
            f"{name}: expected a dense tensor, got a nested one of layout {value.layout}; a jagged tensor's "
            "tokens, one sequence after the other, are its .values()"
        )
    check_strided(name, value)
    if value.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: expected dtype {names}, got {value.dtype}{hint}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected a tensor on {device} like the others, got one on {value.device}")


def check_strided(name: str, value: Tensor) -> None:
    """Raise ValueError for a sparse tensor and the like, which has neither strides nor a storage.

    What is no tensor is left to the checks that follow.
    """
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise ValueError(
            f"{name}: expected a dense tensor, got one of layout {value.layout}; see .to_dense()"
        )


def _check_shape(name: str, value: Tensor, shape: torch.Size, shape_source: str) -> None:
    if value.shape != shape:
        hint = ""
        if value.dim() == len(shape) > 1 and value.shape == shape[1::-1] + shape[2:]:
            hint = "; transpose it: Megatron's labels are [b, s], its logits and hidden states [s, b]"
        raise ValueError(
            f"{name}: expected shape {tuple(shape)}, one value a token of {shape_source}, got "
            f"{tuple(value.shape)}{hint}"
        )


def checked_execution(execution: Execution | None) -> Execution:
    """The options given, or the defaults for None."""
    if execution is None:
        return Execution()
    if not isinstance(execution, Execution):
        raise ValueError(f"execution: expected an Execution or None, got {execution!r}")
    return execution


def checked_transform(transform: LogitTransform | None) -> LogitTransform:
    """The transform given, or one that changes nothing for None."""
    if transform is None:
        return LogitTransform()
    if not isinstance(transform, LogitTransform):
        raise ValueError(f"transform: expected a LogitTransform or None, got {transform!r}")
    return transform


def checked_chunk_size(chunk_size: int | None, default: int) -> int:
    """The chunk size if it is a positive int, or the default for None."""
    if chunk_size is None:
        return default
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size <= 0:
        raise ValueError(f"chunk_size: expected a positive number of tokens or None, got {chunk_size!r}")
    return chunk_size
