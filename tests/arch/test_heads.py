"""Heads in dims of their own: grouped, the group before or after the key heads, masks and factors of any of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.small import HEADS, KEY_HEADS, Tiny, assert_refused, assert_same, inputs, records, step

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
GROUP = HEADS // KEY_HEADS


class Grouped(Tiny):
    """A model whose attention is a function of queries `[B, H, T, D]` and keys and values `[B, K, T, D]`."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def attend(self, x: Tensor) -> Tensor:
        return self.attention(
            self.heads(self.query(x), HEADS), self.heads(self.key(x), KEY_HEADS), self.heads(self.value(x), KEY_HEADS)
        )


def earlier(x: Tensor) -> Tensor:
    """Bools `[T, T]`: which keys are not after the query."""
    return torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()


def slopes(x: Tensor) -> Tensor:
    """A bias of each head that falls with the distance, `[H, T, T]`."""
    at = torch.arange(x.shape[2])
    return -(at[:, None] - at).abs().double() * torch.tensor([0.1, 0.2, 0.3, 0.4]).double()[:, None, None]


def joined(x: Tensor) -> Tensor:
    """`[B, a, b, T, D]` to `[B, H, T, D]`."""
    return x.reshape(x.shape[0], HEADS, *x.shape[3:])


def split(q: Tensor, first: int) -> Tensor:
    return q.view(q.shape[0], first, -1, *q.shape[2:])


def softmax(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -math.inf).softmax(-1)


ORDERS: dict[str, Attention] = {
    "group first": lambda q, k, v: joined(
        softmax(split(q, GROUP) @ k[:, None].mT / 2, earlier(q)) @ v[:, None],
    ),
    "group first, sdpa": lambda q, k, v: joined(
        F.scaled_dot_product_attention(split(q, GROUP), k[:, None], v[:, None], attn_mask=earlier(q))
    ),
    "group first, causal": lambda q, k, v: joined(
        F.scaled_dot_product_attention(split(q, GROUP), k[:, None], v[:, None], is_causal=True)
    ),
    "group first, biased": lambda q, k, v: joined(
        softmax(
            split(q, GROUP) @ k[:, None].mT / 2 + slopes(q).view(GROUP, KEY_HEADS, *slopes(q).shape[1:]), earlier(q)
        )
        @ v[:, None]
    ),
    "group first, capped": lambda q, k, v: joined(
        softmax(torch.tanh(split(q, GROUP) @ k[:, None].mT), earlier(q)) @ v[:, None]
    ),
    "group first, a factor of each head": lambda q, k, v: joined(
        softmax(
            split(q, GROUP) @ k[:, None].mT * torch.linspace(0.2, 0.9, 4).double().view(GROUP, KEY_HEADS, 1, 1),
            earlier(q),
        )
        @ v[:, None]
    ),
    "key heads first": lambda q, k, v: joined(
        F.scaled_dot_product_attention(split(q, KEY_HEADS), k[:, :, None], v[:, :, None], is_causal=True)
    ),
    "key heads first, a factor of each head": lambda q, k, v: joined(
        softmax(
            split(q, KEY_HEADS) @ k[:, :, None].mT * torch.linspace(0.2, 0.9, 4).double().view(KEY_HEADS, GROUP, 1, 1),
            earlier(q),
        )
        @ v[:, :, None]
    ),
    "one key head": lambda q, k, v: joined(
        F.scaled_dot_product_attention(split(q, GROUP), k[:, :1, None], v[:, :1, None], is_causal=True)
    ),
    "one query head": lambda q, k, v: F.scaled_dot_product_attention(q[:, :1], k, v, is_causal=True).repeat(1, 2, 1, 1),
    "one query head, written out": lambda q, k, v: (softmax(q[:, :1] @ k.mT / 2, earlier(q)) @ v).repeat_interleave(
        GROUP, 1
    ),
    "einsum, key heads first": lambda q, k, v: joined(
        torch.einsum(
            "bkgqt,bktd->bkgqd",
            softmax(torch.einsum("bkgqd,bktd->bkgqt", split(q, KEY_HEADS), k) / 2, earlier(q)),
            v,
        )
    ),
    "einsum, tokens first": lambda q, k, v: joined(
        torch.einsum(
            "bkgts,bskd->btkgd",
            softmax(
                torch.einsum("btkgd,bskd->bkgts", split(q, KEY_HEADS).permute(0, 3, 1, 2, 4), k.transpose(1, 2)) / 2,
                earlier(q),
            ),
            v.transpose(1, 2),
        ).permute(0, 2, 3, 1, 4)
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_queries_attend_to_the_keys_of_their_group(name: str) -> None:
    torch._dynamo.reset()
    assert_same(Grouped(ORDERS[name]), *inputs())


@pytest.mark.parametrize("name", ["group first", "key heads first", "one key head", "einsum, key heads first"])
def test_state_is_that_of_the_key_heads(name: str) -> None:
    slots = records(step, Grouped(ORDERS[name]), *inputs())["lower"].step.branches[0].slots
    assert [slot.heads for slot in slots] == [1 if name == "one key head" else KEY_HEADS] * 2


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "of key heads": lambda bias: bias[:KEY_HEADS, None],
    "of key heads and rows": lambda bias: bias[:KEY_HEADS, None][None],
    "of the group": lambda bias: bias[:GROUP],
    "of the group and rows": lambda bias: bias[:GROUP][None, None],
    "of both": lambda bias: bias.view(KEY_HEADS, GROUP, *bias.shape[1:]),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("library", [False, True], ids=["written out", "sdpa"])
def test_masks_line_up_with_the_dims_of_heads(name: str, library: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = MASKS[name](slopes(q)).masked_fill(~earlier(q), -math.inf)
        q, k, v = split(q, KEY_HEADS), k[:, :, None], v[:, :, None]
        if library:
            k, v = (x.expand(-1, -1, GROUP, -1, -1) for x in (k, v))
            return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
        return joined((q @ k.mT / 2 + bias).softmax(-1) @ v)

    torch._dynamo.reset()
    assert_same(Grouped(attention), *inputs())


class OneHead(Tiny):
    """Attention without a dim of heads, under a mask `[rows, T, T]` that hides one token from later ones."""

    def attend(self, x: Tensor) -> Tensor:
        q, k = self.query(x), self.out(x)
        at = torch.arange(x.shape[1])
        marked = (self.ids == 7)[:, None, :] & (at[:, None] != at)
        bias = torch.where((at <= at[:, None]) & ~marked, 0.0, -math.inf).double()
        return self.heads(torch.softmax(q @ k.mT / 4 + bias, -1) @ k, HEADS)

    def hidden(self, ids: Tensor) -> Tensor:
        self.ids = ids
        return super().hidden(ids)


@pytest.mark.parametrize("named", [False, True], ids=["any number of rows", "three rows"])
def test_a_mask_of_rows_without_heads(named: bool) -> None:
    def of_three(model: OneHead, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        ids = torch.cat([prompt.expand(3, -1), responses], 1)
        logp = torch.log_softmax(model(ids)[:, prompt.shape[1] - 1 : -1], -1)
        return (logp.gather(-1, responses[..., None]).squeeze(-1) * weights).sum()

    torch._dynamo.reset()
    prompt, responses, weights = inputs()
    responses[1, 1] = responses[2, 0] = prompt[0, 3] = 7
    assert_same(OneHead(), prompt, responses, weights, function=of_three if named else step)


def test_a_bias_made_of_hidden_values_is_refused() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = torch.sigmoid(k.sum(-1)).repeat_interleave(GROUP, 1)[:, :, None]
        k, v = (x.repeat_interleave(GROUP, 1) for x in (k, v))
        return softmax(q @ k.mT / 2 + bias, earlier(q)) @ v

    assert_refused("computed from hidden values", Grouped(attention))


def test_the_maximum_over_queries_is_no_shift_of_a_softmax() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(GROUP, 1) for x in (k, v))
        scores = (q @ k.mT / 2).masked_fill(~earlier(q), torch.finfo(q.dtype).min)
        return (scores - scores.amax(-2, keepdim=True)).softmax(-1) @ v

    assert_refused("outside attention", Grouped(attention))
