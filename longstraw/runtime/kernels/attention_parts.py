"""Attention of a tile of queries over a tile of keys, forward and backward, as a table of kernels.

Layout: `query` [units, group, q, width], `key` [units, k, width], `value` [units, k, value width]. A unit is a set of
queries that read the same keys, so the keys are never repeated. `bias` [units or 1, group or 1, q, k] is added to the
scores (-inf: not seen); `causal` says that query i sees the keys up to i.

`forward` returns `out` [units, group, q, value width] and the natural `lse` [units, group, q]; a query that sees no key
has 0 and -inf. `backward` takes `out` and `lse` of the softmax over *all* keys, of which the tile is a part; a query
that sees no key at all has `lse` +inf there, which makes all its weights 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from longstraw.runtime.merge import accumulate_dtype

aten = torch.ops.aten

Rescore = Callable[..., Tensor]
"""`rescore(raw, *inputs)`: a differentiable function of the scaled products [units, group, q, k]."""


@dataclass(frozen=True)
class Tile:
    """The inputs of one part."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    causal: bool = False
    bias: Tensor | None = None
    rescore: Rescore | None = None
    rescore_inputs: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class TileGrads:
    """Gradients of a tile's inputs; None for rescore inputs that want none."""

    query: Tensor
    key: Tensor
    value: Tensor
    rescore_inputs: tuple[Tensor | None, ...] = ()


class PartKernel(Protocol):
    """One way to compute a part."""

    builds_scores: bool  # the tile's [units, group, q, k] scores are in memory at once

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype: ...

    def forward(self, tile: Tile) -> tuple[Tensor, Tensor]: ...

    def backward(self, tile: Tile, grad_out: Tensor, out: Tensor, lse: Tensor) -> TileGrads: ...


class Reference:
    """Plain PyTorch: any device, any dtype, any score function."""

    builds_scores = True

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return accumulate_dtype(dtype)

    def forward(self, tile: Tile) -> tuple[Tensor, Tensor]:
        scores = self._scores(tile, self._raw(tile))
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp_()
        return self._per_unit(weights, tile.value), lse

    def backward(self, tile: Tile, grad_out: Tensor, out: Tensor, lse: Tensor) -> TileGrads:
        raw = self._raw(tile)
        wanting = [i for i, x in enumerate(tile.rescore_inputs) if x.requires_grad]
        if tile.rescore is None:
            scores = self._scores(tile, raw)
        else:
            raw.requires_grad_()
            with torch.enable_grad():
                scores = self._scores(tile, raw)
        weights = (scores.detach() - lse[..., None]).exp_()
        grad_value = weights.flatten(1, 2).mT @ grad_out.flatten(1, 2)
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad_scores = self._per_unit(grad_out, tile.value.mT).sub_(delta).mul_(weights)
        rescore_grads: list[Tensor | None] = [None] * len(tile.rescore_inputs)
        if tile.rescore is not None:
            inputs = [raw, *(tile.rescore_inputs[i] for i in wanting)]
            grads = torch.autograd.grad(scores, inputs, grad_scores, allow_unused=True)
            grad_scores = torch.zeros_like(raw) if grads[0] is None else grads[0]
            for i, grad in zip(wanting, grads[1:], strict=True):
                rescore_grads[i] = grad
        grad_scores = grad_scores * tile.scale
        return TileGrads(
            query=self._per_unit(grad_scores, tile.key),
            key=grad_scores.flatten(1, 2).mT @ tile.query.flatten(1, 2),
            value=grad_value,
            rescore_inputs=tuple(rescore_grads),
        )

    @staticmethod
    def _per_unit(left: Tensor, right: Tensor) -> Tensor:
        """[units, group, q, a] @ [units, a, b], without repeating the right side."""
        return (left.flatten(1, 2) @ right).unflatten(1, left.shape[1:3])

    def _raw(self, tile: Tile) -> Tensor:
        return self._per_unit(tile.query, tile.key.mT).mul_(tile.scale)

    @staticmethod
    def _scores(tile: Tile, raw: Tensor) -> Tensor:
        scores = raw if tile.rescore is None else tile.rescore(raw, *tile.rescore_inputs)
        if tile.bias is not None:
            scores = scores + tile.bias
        if tile.causal:
            unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(unseen, -torch.inf)
        return scores


class Flash:
    """A library kernel pair over [batch, heads, tokens, width], given equal widths for keys and values.

    The batch are the units. Without bias and causality a unit's group is folded into the query length, so that key
    gradients come out summed; otherwise the group is the heads, over which the keys are expanded (stride 0).
    """

    builds_scores = False

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(self, tile: Tile) -> tuple[Tensor, Tensor]:
        out, lse = self._call(*self._arguments(tile), tile)
        out, lse = (x.reshape(*tile.query.shape[:3], *x.shape[3:]) for x in (out, lse))
        if tile.bias is not None:  # the kernel's lse of a row without keys is finite
            lse = lse.masked_fill((tile.bias == -torch.inf).all(-1), -torch.inf)
        return out[..., : tile.value.shape[-1]], lse

    def backward(self, tile: Tile, grad_out: Tensor, out: Tensor, lse: Tensor) -> TileGrads:
        query, key, value = self._arguments(tile)
        grad_out, out = (_widen(x, query.shape[-1]).reshape(query.shape) for x in (grad_out, out))
        lse = lse.reshape(query.shape[:3])
        grad_query, grad_key, grad_value = self._call_backward(grad_out, query, key, value, out, lse, tile)
        grad_query = grad_query.reshape(*tile.query.shape[:3], -1)[..., : tile.key.shape[-1]]
        grad_key, grad_value = (x[:, 0] if x.shape[1] == 1 else x.sum(1) for x in (grad_key, grad_value))
        return TileGrads(grad_query, grad_key[..., : tile.key.shape[-1]], grad_value[..., : tile.value.shape[-1]])

    def _arguments(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        width = max(tile.key.shape[-1], tile.value.shape[-1])
        query, key, value = (_widen(x, width) for x in (tile.query, tile.key, tile.value))
        units, group = query.shape[:2]
        heads = group if tile.causal or tile.bias is not None else self._num_heads(units, group)
        key, value = (x[:, None].expand(-1, heads, -1, -1) for x in (key, value))
        return query.reshape(units, heads, -1, width), key, value

    def _num_heads(self, units: int, group: int) -> int:
        """Over how many heads a group is spread where it could all be folded; a divisor of `group`."""
        return 1

    def _call(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _call_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class FlashCPU(Flash):
    """The CPU kernel. It adds key gradients up in its own dtype, so half types are computed in float32."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return accumulate_dtype(dtype)

    def _num_heads(self, units: int, group: int) -> int:
        wanted = -(-torch.get_num_threads() // units)  # its backward runs one thread for each batch entry and head
        return next(n for n in range(min(wanted, group), group + 1) if group % n == 0)

    def _call(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, tile.causal, attn_mask=tile.bias, scale=tile.scale
        )
        return out, lse

    def _call_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, tile.causal, attn_mask=tile.bias, scale=tile.scale
        )
        return grads


class FlashCUDA(Flash):
    """The CUDA kernel: half types, no bias."""

    def _call(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, tile.causal, False, scale=tile.scale
        )
        return out, lse

    def _call_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # read only where there is dropout
        grads: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward(
            grad_out, query, key, value, out, lse.contiguous(), None, None, query.shape[2], key.shape[2],
            0.0, tile.causal, seed, seed[0], scale=tile.scale,
        )  # fmt: skip
        return grads


def _widen(x: Tensor, width: int) -> Tensor:
    """`x` with zeros appended to its last dim, whose numbers lie side by side: the kernels take that for granted."""
    x = x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _flash_cuda_takes(dtype: torch.dtype, width: int, biased: bool) -> bool:
    return dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= 256 and not biased


_TABLE: tuple[tuple[str, Callable[[torch.dtype, int, bool], bool], PartKernel], ...] = (
    ("cpu", lambda dtype, width, biased: True, FlashCPU()),
    ("cuda", _flash_cuda_takes, FlashCUDA()),
)
_REFERENCE = Reference()


def pick_kernel(device: torch.device, dtype: torch.dtype, width: int, *, biased: bool, rescored: bool) -> PartKernel:
    """The first kernel of the table that takes such a tile, or else the reference."""
    kind = "cpu" if device.type == "meta" else device.type  # where only sizes are computed
    for device_type, takes, kernel in _TABLE:
        if device_type == kind and not rescored and takes(dtype, width, biased):
            return kernel
    return _REFERENCE
