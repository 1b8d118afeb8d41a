"""Where captured state rests: on the device, in host memory, or in files; and how parts of it come to the device.

State on the device is read in place. From other tiers attention reads a part at a time, and the part after it is on its
way while one computes: three parts are on the device at most, whatever the length of the prompt. With CUDA the copies
run on a stream of their own, from pinned memory; on other devices the same calls copy at once.

Files have no name while they are in use: each is made readable for its owner only, given all its room, mapped into
memory and unlinked. Nothing is left behind, however the process ends.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw.errors import TierFull


class Tier:
    """Allocates state, and brings it to the device.

    Args:
        where: "device", "host", or a folder.
        device: where the step computes.
    """

    def __init__(self, where: str, device: torch.device) -> None:
        self._where, self.device = where, device
        self.staging = None if where == "device" else Staging(device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, owner: str) -> Tensor:
        """Return room for state `[rows, heads, tokens, width]`; a file's is zero.

        Args:
            shape: its sizes.
            dtype: of its numbers.
            owner: who asks, for messages.

        Raises:
            TierFull: there is no room for it; nothing was allocated.
        """
        if self._where == "device":
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        rows, heads, tokens, width = shape  # consecutive tokens lie together: a part is one run of memory
        laid_out = (tokens, rows, heads, width)
        if self._where == "host":
            whole = torch.empty(laid_out, dtype=dtype, pin_memory=self.device.type == "cuda")
        else:
            whole = _mapped(laid_out, dtype, self._where, owner)
        return whole.permute(1, 2, 0, 3)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, *, owner: str) -> Tensor:
        """As `empty`, with zeros in it."""
        found = self.empty(shape, dtype, owner=owner)
        return found.zero_() if self._where in ("device", "host") else found

    def keep(self, state: Tensor, *, owner: str) -> Tensor:
        """Return a value of any shape in memory of its own on this tier."""
        if self._where == "device":
            shares = state.untyped_storage().nbytes() > state.numel() * state.element_size()
            return state.clone() if shares else state  # a view, e.g. a span's last tokens, would keep the whole alive
        room = self.empty((1, 1, 1, state.numel()), state.dtype, owner=owner).view(state.shape)
        return room.copy_(state)

    def load(self, state: Tensor) -> Tensor:
        """Return a whole value on the device."""
        return state if self.staging is None else self.staging.load(state)


def _mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: str, owner: str) -> Tensor:
    """Return zeros in a new file without a name."""
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    try:
        free = shutil.disk_usage(folder).free
        handle, path = tempfile.mkstemp(prefix="longstraw-", suffix=".state", dir=folder)
    except OSError as error:
        raise TierFull(
            f"No file for the state of {owner} can be made in {folder}: {error.strerror}.",
            remedy="Name a folder that exists and can be written to: options={'state_tier': FOLDER}.",
        ) from error
    try:
        opened = f"/proc/self/fd/{handle}"
        if os.path.exists(opened):  # without a name already now: a process that is killed leaves nothing
            os.unlink(path)
            path = opened
        if size > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)  # room that later writes can't fail to find
        else:
            os.truncate(handle, size)
        return torch.from_file(path, shared=True, size=count, dtype=dtype).view(shape)
    except OSError as error:
        raise TierFull(
            f"The state of {owner} can't have {size:,} bytes in {folder}, which has {free:,} free: {error.strerror}.",
            remedy="Name a folder with more room: options={'state_tier': FOLDER}.",
        ) from error
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        raise TierFull(
            f"A file of {size:,} bytes for the state of {owner} can't be mapped into memory: {error}.",
            remedy="A process has a limit on mappings (vm.max_map_count): use longer spans or a larger boundary_every.",
        ) from error
    finally:
        if path != opened:
            os.unlink(path)
        os.close(handle)


class Staging:
    """Copies parts of resting state to the device, one part ahead of where it is read.

    Args:
        device: where the step computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: dict[tuple[object, ...], tuple[Tensor, torch.cuda.Event | None]] = {}

    def prefetch(self, part: Tensor) -> None:
        """Begin to copy a part; `load` of the same part takes it from here."""
        if _key(part) not in self._ahead:
            self._ahead[_key(part)] = self._copy(part)

    def load(self, part: Tensor) -> Tensor:
        """Return a part on the device, ready for the current stream."""
        self.prefetch(part)
        copy, ready = self._ahead.pop(_key(part))
        if ready is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(ready)
            copy.record_stream(current)
        return copy

    def forget(self) -> None:
        """Let go of parts that were not loaded: what they are copies of may be changed."""
        self._ahead.clear()

    def _copy(self, part: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if self._stream is None:
            return part.detach().to(self._device, copy=True), None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy = part.detach().to(self._device, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record(self._stream)
        return copy, ready


def _key(part: Tensor) -> tuple[object, ...]:
    return (part.data_ptr(), part.shape, part.stride())
