"""Every decoder of transformers: a GRPO step compiled by longstraw equals eager."""

from __future__ import annotations

import pytest
import torch

from longstraw.errors import LongstrawError
from tests.equality import assert_equal, compare
from tests.models import zoo
from tests.steps import STEPS

# One of each way of building attention, positions, norms, heads and experts: these run on every change.
REPRESENTATIVE = (
    "llama", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "gemma4_text", "gpt2", "gpt_neox", "gpt_oss",
    "bloom", "mpt", "falcon", "deepseek_v3", "llama4_text", "diffllama", "bart", "modernbert-decoder",
)  # fmt: skip
OPTIONS = {"span_tokens": 7, "page_tokens": 4}


def swept(name: str) -> pytest.ParameterSet:
    """A model as a parameter, in the slow sweep unless it is representative."""
    return pytest.param(name, marks=() if name in REPRESENTATIVE else pytest.mark.zoo)


# Refused: what breaks the graph, or is no attention that is known, by a part of the message.
REFUSED = {
    "ctrl": "Unsupported python_type() call", "jetmoe": "runs outside of the compiled graph",
    "xmod": "Dynamic shape operator", "dbrx": "Dynamic shape operator", "longcat_flash": "Dynamic shape operator",
    "llama-dynamic": "Data-dependent branching", "doge": "not rows, queries and keys",
    "prophetnet": "is not recognised as attention", "deepseek_v4": "is not recognised as attention",
}  # fmt: skip
# Beside attention they select keys, or arrange blocks of them.
EXACT_TOO = ["big_bird", "dots3_note_text", "hy_v4", "minimax_m3_vl_text"]
ATTENTION_ONLY = [
    name for name in [*zoo.names(), *zoo.VARIANTS] if zoo.mixing(name) == "attention" and name not in REFUSED
]


@pytest.mark.parametrize("name", [swept(name) for name in [*zoo.names(), *zoo.VARIANTS]])
def test_build_gives_a_decoder(name: str) -> None:
    model = zoo.build(name)
    ids = torch.randint(2, zoo.VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=ids, use_cache=False).logits
    assert torch.isfinite(logits).all()

    logits.logsumexp(-1).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(torch.isfinite(gradient).all() for gradient in gradients)

    changed = ids.clone()
    changed[:, 15:] = (changed[:, 15:] - 2 + 5) % (zoo.VOCAB - 2) + 2
    with torch.no_grad():
        later = (model(input_ids=changed, use_cache=False).logits - logits)[:, :15].abs().max()
        alone = (model(input_ids=ids[1:], use_cache=False).logits - logits[1:]).abs().max()
    assert later < 1e-6, "a token reads later tokens"
    assert alone < 1e-5, "a row reads other rows"


@pytest.mark.parametrize("name", [swept(name) for name in (*ATTENTION_ONLY, *EXACT_TOO)])
def test_step_equals_eager(name: str) -> None:
    model = zoo.build(name)
    step = STEPS["grpo"]
    inputs = step.inputs(model)
    comparison = compare(step, model, inputs, options=OPTIONS)
    print(name, comparison.describe(), sep="\n")
    assert_equal(comparison, rtol=1e-10)


@pytest.mark.parametrize("name", [swept(name) for name in REFUSED])
def test_step_is_refused(name: str) -> None:
    model, step = zoo.build(name), STEPS["grpo"]
    with pytest.raises(LongstrawError) as caught:
        compare(step, model, step.inputs(model), options=OPTIONS)
    assert REFUSED[name] in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "phi3"])
def test_step_equals_eager_with_attention_written_out(name: str) -> None:
    model = zoo.build(name, attention="eager")
    step = STEPS["grpo"]
    inputs = step.inputs(model)
    assert_equal(compare(step, model, inputs, options=OPTIONS), rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "grpo"), ("qwen3_moe", "grpo"), ("qwen3", "positions_only"), ("qwen3", "padded_batch")]
)
def test_step_of_unmodified_model_equals_eager_to_float32(name: str, kind: str) -> None:
    """With positions of each row the state of qwen3 is what keys are built from: hidden values, and the positions'."""
    model = zoo.build(name, float64_inside=False)
    step = STEPS[kind]
    inputs = step.inputs(model)
    assert_equal(compare(step, model, inputs, options=OPTIONS), rtol=2e-6)
