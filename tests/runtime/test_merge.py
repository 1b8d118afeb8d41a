import math

import pytest
import torch

from longstraw.runtime.merge import merge, merge_into, merge_sink_into


def part(scores, values):
    """The partial result of one set of keys; scores [..., n], values [..., n, width]."""
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return (weights[..., None, :] @ values)[..., 0, :], lse


def streamed(outs, lses):
    out, lse = torch.zeros_like(outs[0]), torch.full_like(lses[0], -torch.inf)
    for part_out, part_lse in zip(outs, lses, strict=True):
        merge_into(out, lse, part_out, part_lse)
    return out, lse


def test_merge_equals_one_softmax():
    torch.manual_seed(0)
    scores, values = torch.randn(3, 5, 68, dtype=torch.float64), torch.randn(3, 5, 68, 4, dtype=torch.float64)
    pieces = [slice(0, 64), slice(64, 65), slice(65, 68)]
    outs, lses = zip(*(part(scores[..., p], values[..., p, :]) for p in pieces), strict=True)
    for merged in (merge(outs, lses), streamed(outs, lses)):
        for got, expected in zip(merged, part(scores, values), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merge_of_empty_parts_is_empty_with_zero_gradients(dtype):
    outs = [torch.zeros(1, 4, dtype=dtype, requires_grad=True) for _ in range(2)]
    lses = [torch.full((1,), -torch.inf, dtype=dtype, requires_grad=True) for _ in range(2)]
    out, lse = merge(outs, lses)
    assert torch.equal(out, torch.zeros(1, 4, dtype=dtype)) and lse.item() == -math.inf
    for grad in torch.autograd.grad([out, lse], [*outs, *lses], [torch.ones_like(out), torch.ones_like(lse)]):
        assert torch.equal(grad, torch.zeros_like(grad))
    out, lse = streamed([x.detach() for x in outs], [x.detach() for x in lses])
    assert torch.equal(out, torch.zeros(1, 4, dtype=dtype)) and lse.item() == -math.inf


def test_merge_with_one_empty_part_is_the_other_part():
    outs = [torch.zeros(2, 4), torch.randn(2, 4)]
    lses = [torch.full((2,), -torch.inf), torch.randn(2)]
    for merged in (merge(outs, lses), streamed(outs, lses), merge(outs[::-1], lses[::-1])):
        assert torch.equal(merged[0], outs[1]) and torch.equal(merged[1], lses[1])


@pytest.mark.parametrize("low, high", [(0.0, 100.0), (-1e4, 1e4), (1e30, 3e38)])
def test_merge_does_not_overflow(low, high):
    outs = [torch.ones(1, 2), torch.full((1, 2), 3.0)]
    lses = [torch.tensor([low]), torch.tensor([high])]
    for merged in (merge(outs, lses), streamed(outs, lses), merge(outs[::-1], lses[::-1])):
        assert torch.equal(merged[0], outs[1]) and torch.equal(merged[1], lses[1])


def test_merge_is_differentiable():
    torch.manual_seed(0)
    outs = [torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: merge(x[:3], x[3:]), (*outs, *lses))


def test_merge_sums_half_parts_in_float32():
    outs = [torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.bfloat16)]
    out, lse = merge(outs, [torch.tensor([0.0]), torch.tensor([-7.0])])
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.item(), 1 / (1 + math.exp(-7)), rtol=1e-6, atol=0)


def test_merge_sink_into_equals_a_key_with_zero_value():
    torch.manual_seed(0)
    scores, values = torch.randn(3, 7, 5, dtype=torch.float64), torch.randn(3, 7, 5, 4, dtype=torch.float64)
    scores[0] = -torch.inf
    sink = torch.randn(3, 1, dtype=torch.float64)
    out, lse = part(scores, values)
    merge_sink_into(out, lse, sink)
    wide = torch.cat([scores, sink[..., None].expand(3, 7, 1)], -1), torch.cat([values, torch.zeros(3, 7, 1, 4)], -2)
    for got, expected in zip((out, lse), part(*wide), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
