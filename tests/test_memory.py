"""Memory laws, counted on live tensors: flat in the group, in the prompt only the state, never a span's logits."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longstraw import backend, explain
from longstraw.runtime import attention, mixing, selection, spans, tiers
from longstraw.runtime.live_bytes import LiveBytes
from tests.models import zoo
from tests.steps import STEPS

STEP = STEPS["grpo"]
WIDTH = 64
LAYERS = 4
# Keys and values, two heads of sixteen, float64; and as much again for their gradients.
STATE_BYTES = LAYERS * 2 * 2 * 16 * 8


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> LiveBytes:
    """Counts in each compiled step, from its first operator."""
    counter = LiveBytes()
    run_step = backend.run_step

    def counted(*args: Any) -> Any:
        with counter:
            return run_step(*args)

    monkeypatch.setattr(backend, "run_step", counted)
    return counter


def peak(live: LiveBytes, step: Any, model: nn.Module, inputs: dict[str, Any]) -> int:
    """The most bytes alive at once in one step and its backward; gradients are there from the start."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    live.restart()
    live.peak = 0
    loss = step(model, **inputs)
    with live:
        loss.backward()
    return live.peak


def compiled(span_tokens: int, **options: Any) -> Any:
    options = {"span_tokens": span_tokens, "replay_rows": 1, "grad_dtype": torch.float64, **options}
    return torch.compile(STEP.function, backend="longstraw", options=options)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3_5_text", pytest.param("mamba2", marks=pytest.mark.slow), "glm_moe_dsa"]
)
def test_peak_does_not_depend_on_the_group(live: LiveBytes, name: str) -> None:
    model = zoo.build(name)
    step = compiled(span_tokens=16)
    prompt, response = 40, 16
    steps = [STEP.inputs(model, prompt=prompt, response=response, group=g) for g in (2, 8)]
    for inputs in steps:
        inputs["mask"] = torch.ones_like(inputs["mask"])  # what is masked at the end of a row isn't replayed
    peaks = [peak(live, step, model, inputs) for inputs in steps]
    # What is as large as the group: token ids, masks, results and their gradients; no hidden state of a row.
    added = (peaks[1] - peaks[0]) / 6
    assert added < 16 * 8 * (prompt + response)
    assert added < response * WIDTH * 8


@pytest.mark.parametrize(("prompt_grad", "copies"), [("exact", 2), ("none", 1)])
def test_peak_grows_with_the_prompt_by_its_state(live: LiveBytes, prompt_grad: str, copies: int) -> None:
    model = zoo.build("llama", layers=LAYERS)
    step = compiled(span_tokens=16, prompt_grad=prompt_grad)
    peaks = [peak(live, step, model, STEP.inputs(model, prompt=p, response=8, group=1)) for p in (128, 384)]
    slope = (peaks[1] - peaks[0]) / 256
    assert copies * STATE_BYTES <= slope <= 1.3 * copies * STATE_BYTES


def test_peak_does_not_grow_with_a_prompt_whose_state_is_in_files(
    live: LiveBytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_files = 0
    mapped = tiers._mapped

    def uncounted(*args: Any) -> Tensor:
        nonlocal in_files
        with torch.utils._python_dispatch._disable_current_modes():
            found = mapped(*args)
        in_files += found.numel() * found.element_size()
        return found

    monkeypatch.setattr(tiers, "_mapped", uncounted)
    monkeypatch.setattr(attention.attend, "__kwdefaults__", {**attention.attend.__kwdefaults__, "key_tile": 16})
    model = zoo.build("llama", layers=LAYERS)
    step = compiled(span_tokens=16, state_tier=str(tmp_path))
    peaks, sizes = [], []
    for prompt in (128, 384):
        in_files = 0
        peaks.append(peak(live, step, model, STEP.inputs(model, prompt=prompt, response=8, group=2)))
        sizes.append(in_files)
    assert sizes[1] - sizes[0] >= 256 * 2 * STATE_BYTES  # state and its gradients
    # A few numbers of each row: token ids, positions, what was compared.
    assert (peaks[1] - peaks[0]) / 256 < 2 * STATE_BYTES / 16


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of scores, of gathered keys and of built keys small beside the state of these tests' prompts."""
    monkeypatch.setattr(selection, "TILE_BYTES", 1 << 16)
    monkeypatch.setattr(attention, "BUILT_BYTES", 1 << 16)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("gather_cost", [1e-9, pytest.param(1e9, marks=pytest.mark.slow)], ids=["gathered", "masked"])
def test_peak_of_sparse_attention_grows_with_the_prompt_by_latents_and_keys(
    live: LiveBytes, monkeypatch: pytest.MonkeyPatch, gather_cost: float
) -> None:
    monkeypatch.setattr(mixing, "GATHER_COST", gather_cost)
    model = zoo.build("glm_moe_dsa", index_topk=16, indexer_types=["full", "shared"])
    config = model.config
    latents = config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    expected = 8 * (2 * latents + config.index_head_dim)  # keys of the indexer have no gradient
    step = compiled(span_tokens=16)
    # From where a tile of keys is full.
    peaks = [peak(live, step, model, STEP.inputs(model, prompt=p, response=8, group=2)) for p in (512, 768)]
    slope = (peaks[1] - peaks[0]) / 256
    assert expected <= slope <= 1.3 * expected


@pytest.mark.parametrize("tiled", [True, False])
def test_logits_of_a_span_are_never_alive(live: LiveBytes, monkeypatch: pytest.MonkeyPatch, tiled: bool) -> None:
    vocab, span = 4096, 3 * WIDTH  # more than twice the weights of the head
    monkeypatch.setattr(spans, "TILE_BYTES", 1 << 20 if tiled else 1 << 40)
    model = zoo.build("llama", vocab_size=vocab)
    peak(live, compiled(span_tokens=span), model, STEP.inputs(model, prompt=8, response=span, group=1))
    assert (live.largest < span // 2 * vocab * 8) == tiled


def test_peak_of_a_recurrent_model_grows_with_the_prompt_by_saved_boundary_states(live: LiveBytes) -> None:
    model = zoo.build("mamba2", layers=1)
    program = explain(STEP.function, model, **STEP.inputs(model)).programs[0]
    state = sum(carry.num_bytes for carry in program.step.branches[0].carries)
    assert not program.step.branches[0].slots
    span, prompts = 16, (64, 160)
    slopes = {}
    for every in (1, 1000):
        step = compiled(span_tokens=span, boundary_every=every)
        peaks = [peak(live, step, model, STEP.inputs(model, prompt=p, response=8, group=2)) for p in prompts]
        slopes[every] = (peaks[1] - peaks[0]) / (prompts[1] - prompts[0])
    ids = 16 * 8  # a few numbers for every token: ids, positions, and copies of them
    assert state / span <= slopes[1] <= state / span + ids
    # States that are computed anew are held from the first to the last span while the last ones are unwound.
    assert slopes[1000] <= state / span + ids


def test_thinned_boundary_states_take_less(live: LiveBytes) -> None:
    model = zoo.build("mamba2", layers=1)
    inputs = STEP.inputs(model, prompt=320, response=8, group=2)
    peaks = [peak(live, compiled(span_tokens=8, boundary_every=n), model, inputs) for n in (1, 8)]
    assert peaks[1] < 0.7 * peaks[0]
