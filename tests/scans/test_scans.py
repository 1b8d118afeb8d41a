"""Scans against a loop over tokens, span by span, with every gradient, in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from longstraw.scans import delta_rule, linear_recurrence, short_conv
from tests.models import float64

Inputs = list[Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def delta_inputs(tokens: int, by_channel: bool = False, key_heads: int = 2) -> Inputs:
    rows, heads, width, value_width = 2, 4, 5, 3
    decay = (rows, tokens, heads, width) if by_channel else (rows, tokens, heads)
    return [
        random(rows, tokens, key_heads, width),
        F.normalize(random(rows, tokens, key_heads, width, seed=1), dim=-1),
        random(rows, tokens, heads, value_width),
        -random(*decay).abs(),
        random(rows, tokens, heads, seed=2).sigmoid(),
    ]


def delta_by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    groups = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    outs = []
    for t in range(v.shape[1]):
        decay = g[:, t].exp()
        state = state * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * new[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1), state


def linear_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return delta_by_token(q, k, v, g, None, state)


def recurrence_by_token(decay: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outs = []
    for t in range(value.shape[1]):
        state = decay[:, t] * state + value[:, t]
        outs.append(state)
    return torch.stack(outs, 1), state


def selective_by_token(
    x: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    outs = []
    for t in range(x.shape[1]):
        state = (step[:, t, :, None] * rate).exp() * state + (step * x)[:, t, :, None] * write[:, t, None]
        outs.append((state * read[:, t, None]).sum(-1))
    return torch.stack(outs, 1), state


def selective_inputs(tokens: int) -> Inputs:
    return [
        random(2, tokens, 3),
        random(2, tokens, 3, seed=1).abs(),
        -random(3, 4).abs(),
        random(2, tokens, 4),
        random(2, tokens, 4, seed=1),
    ]


CASES: dict[str, tuple[Callable, Callable, Callable[[int], Inputs], tuple[int, ...]]] = {
    "gated_delta_rule": (delta_rule.gated_delta_rule, delta_by_token, delta_inputs, (2, 4, 5, 3)),
    "gated_delta_rule_by_channel": (
        delta_rule.gated_delta_rule, delta_by_token, lambda t: delta_inputs(t, by_channel=True), (2, 4, 5, 3),
    ),
    "linear_attention": (delta_rule.linear_attention, linear_by_token, lambda t: delta_inputs(t)[:4], (2, 4, 5, 3)),
    "linear_recurrence": (
        linear_recurrence.linear_recurrence, recurrence_by_token,
        lambda t: [random(2, t, 3).sigmoid(), random(2, t, 3, seed=1)], (2, 3),
    ),
    "selective_scan": (linear_recurrence.selective_scan, selective_by_token, selective_inputs, (2, 3, 4)),
}  # fmt: skip


def run(function: Callable, inputs: Inputs, state: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor, Inputs]:
    """Run a scan in pieces; return the output, the last state, and the gradients of all inputs and the first state."""
    leaves = [x.clone().requires_grad_() for x in (*inputs, state)]
    *values, last = leaves
    tokens, outs = inputs[0].shape[1], []
    for lo, hi in zip([0, *cuts], [*cuts, tokens], strict=True):
        piece = [x[:, lo:hi] if x.dim() > 2 else x for x in values]
        out, last = function(*piece, last)
        outs.append(out)
    whole = torch.cat(outs, 1)
    ((whole * random(*whole.shape, seed=5)).sum() + (last * random(*last.shape, seed=6)).sum()).backward()
    return whole, last, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("name", CASES)
def test_scan_equals_a_loop_over_tokens(name: str, tokens: int) -> None:
    function, loop, make, shape = CASES[name]
    inputs, state = make(tokens), random(*shape, seed=9)
    expected = run(loop, inputs, state, [])
    for cuts in ([], [tokens // 3] if tokens > 2 else []):
        found = run(function, inputs, state, cuts)
        for one, other in zip((*expected[:2], *expected[2]), (*found[:2], *found[2]), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_delta_rule_by_channel"])
def test_keys_that_are_zero_have_finite_gradients(name: str) -> None:
    function, _, make, shape = CASES[name]
    inputs = make(20)
    inputs[1][:, :7] = 0
    _, _, grads = run(function, inputs, torch.zeros(shape, dtype=torch.float64), [])
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.fixture
def models_as_written() -> None:
    """The models' functions in the dtypes that they name, whatever ran before in this process."""
    float64.restore()


@pytest.mark.usefixtures("models_as_written")
@pytest.mark.parametrize("by_channel", [False, True])
def test_strong_decay_is_as_exact_in_float32_as_the_models_own_function(by_channel: bool) -> None:
    """Decays are differences of sums up to 1e4 there, which cost both the same digits; nothing overflows."""
    theirs = kimi.chunk_kimi_delta_attention if by_channel else qwen.torch_chunk_gated_delta_rule
    inputs = [x.float() for x in delta_inputs(64, by_channel, key_heads=4)]
    inputs[3] = inputs[3] * 200
    exact, _ = delta_by_token(*(x.double() for x in inputs), torch.zeros(2, 4, 5, 3, dtype=torch.float64))
    out, last = delta_rule.gated_delta_rule(*inputs, torch.zeros(2, 4, 5, 3))
    scaled = [inputs[0] * 5**0.5, *inputs[1:]]  # theirs divides queries by the root of their width
    reference, _ = inspect.unwrap(theirs)(*scaled)
    ours, other = ((x.double() - exact).norm() for x in (out, reference))
    assert torch.isfinite(last).all()
    assert ours <= 1.1 * other + torch.finfo(torch.float32).eps * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    inputs = [x.to(dtype) for x in delta_inputs(70)]
    out, state = delta_rule.gated_delta_rule(*inputs, torch.zeros(2, 4, 5, 3))
    exact, _ = delta_by_token(*(x.double() for x in inputs), torch.zeros(2, 4, 5, 3, dtype=torch.float64))
    assert out.dtype == dtype and state.dtype == torch.float32
    torch.testing.assert_close(out, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("cuts", [[], [1], [2, 3, 4], [5, 6]])
@pytest.mark.parametrize("dilation", [1, 2])
def test_causal_conv_equals_padding_on_the_left(dilation: int, cuts: list[int]) -> None:
    x, weight, bias = random(2, 6, 9), random(6, 2, 4), random(6)
    expected = F.conv1d(F.pad(x, (3 * dilation, 0)), weight, bias, dilation=dilation, groups=3)
    tail, outs = x.new_zeros(2, 6, 3 * dilation), []
    for lo, hi in zip([0, *cuts], [*cuts, 9], strict=True):
        out, tail = short_conv.causal_conv(x[..., lo:hi], weight, bias, dilation, 3, tail)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, -1), expected, rtol=1e-12, atol=1e-12)


def test_running_sum_continues() -> None:
    x = random(2, 7, 3)
    first, total = short_conv.running_sum(x[:, :4], 1, x.dtype, x.new_zeros(2, 3))
    second, total = short_conv.running_sum(x[:, 4:], 1, x.dtype, total)
    torch.testing.assert_close(torch.cat([first, second], 1), x.cumsum(1))
    torch.testing.assert_close(total, x.sum(1))


@pytest.mark.parametrize("name", ["gated_delta_rule", "linear_attention", "linear_recurrence", "selective_scan"])
def test_scan_op_has_the_gradients_of_its_step(name: str) -> None:
    function, _, make, shape = CASES[name]
    op = getattr(torch.ops.longstraw, name)
    inputs, state = make(9), torch.zeros(shape, dtype=torch.float64)

    def by_op(*values: Tensor) -> tuple[Tensor, Tensor]:
        *rest, first = values
        return op(list(rest), first)

    expected, found = run(function, inputs, state, []), run(by_op, inputs, state, [])
    for one, other in zip((*expected[:2], *expected[2]), (*found[:2], *found[2]), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
