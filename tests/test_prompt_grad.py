"""prompt_grad="none": the responses' gradient alone, which is eager's with the prompt's keys and values detached."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longstraw.errors import PromptNotFound
from tests.small import HEADS, KEY_HEADS, Tiny, gradients, inputs, step


class Detached(Tiny):
    """Tokens before `prompt_stop` give their keys and values to later ones as constants."""

    prompt_stop = 0

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x), HEADS), *(self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
        k, v = (torch.cat([t[:, :, : self.prompt_stop].detach(), t[:, :, self.prompt_stop :]], 2) for t in (k, v))
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("span_tokens", [1, 3, 100])
@pytest.mark.parametrize(("prompt", "replay_rows"), [(1, 1), (9, 3), (12, 2)])
def test_none_equals_eager_with_the_prompts_state_detached(prompt: int, span_tokens: int, replay_rows: int) -> None:
    model = Tiny()
    reference = Detached()
    reference.load_state_dict(model.state_dict())
    reference.prompt_stop = prompt - 1  # the last prompt token predicts the first response token: it is replayed
    if prompt == 1:
        with pytest.raises(PromptNotFound, match="where the prompt ends"):
            run(model, prompt, span_tokens, replay_rows)
        return
    loss, expected = gradients(step, reference, *inputs(prompt=prompt))
    found_loss, found = run(model, prompt, span_tokens, replay_rows)
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-11)


def run(model: Tiny, prompt: int, span_tokens: int, replay_rows: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    options = {"prompt_grad": "none", "span_tokens": span_tokens, "replay_rows": replay_rows, "page_tokens": 2}
    return gradients(torch.compile(step, backend="longstraw", options=options), model, *inputs(prompt=prompt))


def test_none_differs_from_exact() -> None:
    model = Tiny()
    _, eager = gradients(step, model, *inputs())
    eager = copy.deepcopy(eager)
    _, none = run(model, 9, 4, 1)
    # Far apart, not by rounding: a loose tolerance makes this the stricter check.
    assert not torch.allclose(none["table.weight"], eager["table.weight"], rtol=1e-3)


def test_none_detaches_each_of_two_prompts() -> None:
    prompts = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(3))
    _, responses, weights = inputs(group=4)
    rows = prompts.repeat_interleave(2, 0)

    def joined(model: Tiny, rows: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        logits = model(torch.cat([rows, responses], 1))[:, rows.shape[1] - 1 : -1]
        return (torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1) * weights).sum()

    model, reference = Tiny(), Detached()
    reference.prompt_stop = 8
    _, expected = gradients(joined, reference, rows, responses, weights)
    options = {"prompt_grad": "none", "span_tokens": 3, "page_tokens": 2}
    _, found = gradients(torch.compile(joined, backend="longstraw", options=options), model, rows, responses, weights)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-11)
