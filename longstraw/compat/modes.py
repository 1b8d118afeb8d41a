"""Autocast and inference mode as settings and as ops of a graph; other private ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
from torch._higher_order_ops.associative_scan import generic_associative_scan
from torch._logging._internal import trace_structured


def emit_artifact(name: str, text: Callable[[], str]) -> None:
    """Hand a stage's text to TORCH_TRACE and TORCH_LOGS."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


@contextlib.contextmanager
def autocast_state(state: tuple[tuple[str, bool, torch.dtype], ...]) -> Iterator[None]:
    """Run with the autocast settings that `current_autocast` returned earlier."""
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in state:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


def enter_autocast(device: str, enabled: bool, dtype: torch.dtype) -> torch.autocast:
    """Enter autocast from a graph; casts are not cached, for a span's graph dies with its backward."""
    context = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
    context.__enter__()
    return context


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which dtypes stay as they are, for a device type that may have no autocast."""
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def exit_autocast(context: torch.autocast) -> None:
    """Leave what `enter_autocast` entered."""
    context.__exit__(None, None, None)


enter_inference_mode = torch.autograd.grad_mode._enter_inference_mode


exit_inference_mode = torch.autograd.grad_mode._exit_inference_mode


read_data = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
"""What `torch.inference_mode` and `tensor.data` are in a Dynamo graph."""


def waits_for_grad(leaf: torch.Tensor) -> bool:
    """Return whether hooks of a leaf are called after a gradient was added to its `.grad`."""
    return bool(leaf._post_accumulate_grad_hooks)


def current_autocast(device: str) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Return the autocast settings in force for a device type, for `autocast_state`; none where it has no autocast."""
    if not torch.amp.is_autocast_available(device):  # as on the meta device
        return ()
    return ((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),)


def associative_scan(
    combine: Callable[..., Sequence[torch.Tensor]],
    values: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor],
    *,
    dim: int,
) -> list[torch.Tensor]:
    """Scan values along a dim with `combine(*left, *right, *extras)`, which takes entries of that dim apart."""
    return list(generic_associative_scan(combine, list(values), dim=dim, additional_inputs=tuple(extras)))
