"""State that rests elsewhere than on the device: the same bits, a few parts staged, no files left behind."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longstraw import errors
from longstraw.runtime import attention, mixing, tiers
from longstraw.runtime.tiers import Staging, Tier
from tests.models import zoo
from tests.steps import STEPS
from tests.sweeps import sweep

STEP = STEPS["grpo"]
CPU = torch.device("cpu")


def compiled(tier: str | Path, **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"state_tier": tier, "span_tokens": 7, "page_tokens": 4, **options}
    return torch.compile(STEP.function, backend="longstraw", options=options)


def loss_and_gradients(step: Any, model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    model.zero_grad()
    loss = step(model, **inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {},  # a sliding window: some tokens are not kept
    "qwen3_5_text": {},  # boundary states
    "glm_moe_dsa": {"index_topk": 4, "indexer_types": ["full", "shared"]},
    "deepseek_v2": {},  # latents, built and absorbed
}


@pytest.mark.parametrize(
    ("name", "gathered"),
    sweep(
        [*((name, True) for name in MODELS), ("glm_moe_dsa", False)],
        always=[("qwen3_5_text", True), ("deepseek_v2", True)],
    ),
)
def test_results_are_bit_equal_on_every_tier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, gathered: bool
) -> None:
    monkeypatch.setattr(mixing, "GATHER_COST", 1e-9 if gathered else 1e9)
    model = zoo.build(name, **MODELS[name])
    inputs = STEP.inputs(model, prompt=40, response=9)
    options = {"boundary_every": 2}  # some boundary states are kept, some computed again
    expected = loss_and_gradients(compiled("device", **options), model, inputs)
    assert len(expected) > 10
    for tier in ("host", tmp_path):
        found = loss_and_gradients(compiled(tier, **options), model, inputs)
        assert len(found) == len(expected)
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("prompt", sweep([1, 30], always=[30]))
def test_state_of_shorter_prompts_and_bfloat16_in_files(tmp_path: Path, prompt: int) -> None:
    model = zoo.build("llama", dtype=torch.bfloat16)
    inputs = STEP.inputs(model, prompt=prompt, response=3, dtype=torch.bfloat16)
    expected = loss_and_gradients(compiled("device"), model, inputs)
    found = loss_and_gradients(compiled(str(tmp_path)), model, inputs)
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


class Watched(Staging):
    """Remembers how many bytes were staged at once."""

    most = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def _copy(self, part: Tensor) -> Any:
        found = super()._copy(part)
        self.alive.add(found[0])
        held = sum(x.numel() * x.element_size() for x in self.alive)
        Watched.most = max(Watched.most, held)
        return found


def test_three_parts_of_one_layer_are_staged_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    part = 16
    monkeypatch.setattr(tiers, "Staging", Watched)
    monkeypatch.setattr(attention, "KEY_TILE", part)
    monkeypatch.setattr(attention.attend, "__kwdefaults__", {**attention.attend.__kwdefaults__, "key_tile": part})
    Watched.most = 0
    model = zoo.build("llama", layers=4)
    inputs = STEP.inputs(model, prompt=300, response=5)
    loss_and_gradients(compiled("host", span_tokens=32), model, inputs)
    config = model.config
    numbers = config.num_key_value_heads * config.head_dim
    keys_and_values = 2 * part * numbers * 8
    gradients_of_a_span = 2 * config.num_hidden_layers * 32 * numbers * 8
    assert keys_and_values < Watched.most <= 3 * keys_and_values + gradients_of_a_span
    assert Watched.most < 300 * 2 * numbers * 8  # the prompt's keys and values of one layer


def test_prefetched_parts_are_what_is_loaded() -> None:
    staging = Staging(CPU)
    whole = torch.arange(24.0).reshape(1, 2, 6, 2)
    staging.prefetch(whole[:, :, 1:3])
    staging.prefetch(whole[:, :, 3:6])
    assert torch.equal(staging.load(whole[:, :, 3:6]), whole[:, :, 3:6])
    assert torch.equal(staging.load(whole[:, :, 1:3]), whole[:, :, 1:3])
    whole += 1
    assert torch.equal(staging.load(whole[:, :, 1:3]), whole[:, :, 1:3])  # copied anew


class Stream:
    """What a stream has done or waited for, as CUDA orders it; `Stream.current` is where work goes."""

    current: Stream

    def __init__(self, *_: object) -> None:
        self.done: set[str] = set()

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def wait_event(self, event: Event) -> None:
        self.done |= event.done

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        before, Stream.current = Stream.current, self
        yield
        Stream.current = before


class Event:
    """What its stream had done when it was recorded."""

    def record(self, stream: Stream) -> None:
        self.done = set(stream.done)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """A device with streams in place of the CPU; gives the copies whose memory another stream was told of."""
    Stream.current = Stream()
    told: list[Tensor] = []
    to, names = Tensor.to, itertools.count()

    def copied(self: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        assert non_blocking
        Stream.current.done.add(f"copy {next(names)}")
        return to(self, *args, **kwargs).clone()

    for name, fake in {"Stream": Stream, "Event": Event, "stream": Stream.used}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: told.append(self))
    monkeypatch.setattr(Tensor, "to", copied)
    yield told


def test_copies_run_on_a_stream_of_their_own_after_writes_and_before_reads(streams: list[Tensor]) -> None:
    staging = Staging(CPU)
    staging._stream = side = Stream()  # as for a device of type cuda
    whole = torch.arange(24.0).reshape(1, 2, 6, 2)
    Stream.current.done.add("write")
    staging.prefetch(whole[:, :, :3])
    assert side.done == {"write", "copy 0"}, "what was written before is what is copied"
    Stream.current.done.add("compute")
    assert "copy 0" not in Stream.current.done, "nothing waits for a part before it is read"
    staging.prefetch(whole[:, :, 3:])
    first = staging.load(whole[:, :, :3])
    assert {"write", "compute", "copy 0"} == Stream.current.done, "the part after it may still be on its way"
    second = staging.load(whole[:, :, 3:])
    assert "copy 1" in Stream.current.done
    assert torch.equal(torch.cat([first, second], 2), whole)
    assert [copy is part for copy, part in zip(streams, (first, second), strict=True)] == [True, True]


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_are_private_and_have_no_name_while_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    modes = []
    from_file = torch.from_file

    def watched(path: str, **arguments: Any) -> Tensor:
        modes.append(stat.S_IMODE(os.stat(path).st_mode))
        return from_file(path, **arguments)

    monkeypatch.setattr(torch, "from_file", watched)
    state = Tier(str(tmp_path), CPU).empty((1, 2, 5, 3), torch.float32, owner="the test")
    assert modes == [0o600] and not list(tmp_path.iterdir())
    assert state.shape == (1, 2, 5, 3) and not state.any()
    state[:, :, 2] = 7
    assert float(state.sum()) == 7 * 6


@pytest.mark.parametrize("when", ["making room", "done"])
def test_nothing_is_left_when_the_process_is_killed(tmp_path: Path, when: str) -> None:
    source = f"""
        import os, signal, torch
        from longstraw.runtime.tiers import Tier
        if {when!r} == "making room":
            os.posix_fallocate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        state = Tier({str(tmp_path)!r}, torch.device("cpu")).empty((1, 1, 100, 8), torch.float32, owner="the test")
        state.fill_(1)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=False, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    model = zoo.build("llama")
    (tmp_path / "gone").mkdir()
    step = compiled(tmp_path / "gone")
    step(model, **STEP.inputs(model))
    (tmp_path / "gone").rmdir()
    with pytest.raises(errors.TierFull, match=r"(?s)No file for the state of rows 0.*No such file.*state_tier"):
        step(model, **STEP.inputs(model, prompt=40, response=9))


@pytest.mark.parametrize("found_out", ["before", "while making room"])
def test_a_full_disk_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found_out: str) -> None:
    model = zoo.build("llama")
    inputs = STEP.inputs(model, prompt=40, response=9)
    step = compiled(tmp_path)
    expected = [x.clone() for x in loss_and_gradients(step, model, inputs)]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if found_out == "before":
            usage = tiers.shutil.disk_usage(tmp_path)
            patch.setattr(tiers.shutil, "disk_usage", lambda _: usage._replace(free=1000))
        else:
            patch.setattr(tiers.os, "posix_fallocate", full)
        with pytest.raises(
            errors.TierFull, match=r"(?s)rows 0\.\.\d+, tokens 0.*can't have .* bytes in .*No space left.*state_tier"
        ) as caught:
            step(model, **inputs).backward()
        assert str(tmp_path) in str(caught.value)
    assert not list(tmp_path.iterdir())
    for parameter, gradient in zip((p for p in model.parameters() if p.grad is not None), expected[1:], strict=True):
        assert torch.equal(parameter.grad, gradient)
    for got, want in zip(loss_and_gradients(step, model, inputs), expected, strict=True):
        assert torch.equal(got, want)
