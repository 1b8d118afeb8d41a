"""explain: one screen, stages as Python that runs, nothing executed."""

from __future__ import annotations

import pytest
import torch

import longstraw
from longstraw.explain import STAGES
from tests.small import Tiny, inputs, step


@pytest.fixture(scope="module")
def explanation() -> longstraw.Explanation:
    return longstraw.explain(step, Tiny(), *inputs())


def test_explain_says_what_is_kept_per_token(explanation: longstraw.Explanation) -> None:
    text = str(explanation)
    assert "256 bytes per token of a row" in text  # 2 attentions x 2 key heads x 4 wide, keys and values, float64
    assert "2 x 4 keys, 2 x 4 values, float64, causal" in text
    assert len(text.splitlines()) < 40


@pytest.mark.parametrize("name", STAGES)
def test_explain_stages_are_python(explanation: longstraw.Explanation, name: str) -> None:
    namespace: dict[str, object] = {}
    exec(compile(explanation.stage(name), name, "exec"), namespace)
    assert any(callable(namespace.get(key)) for key in ("step", "branch_0_body", "branch_0_capture"))


def test_explain_stage_computes_the_step(explanation: longstraw.Explanation) -> None:
    model, values = Tiny(), inputs()
    record = explanation.records[0]["normalise"]
    known = dict(model.named_parameters())
    places = {f"model.{name}": p for name, p in known.items()}
    places |= {"prompt": values[0], "responses": values[1], "weights": values[2]}
    arguments = [
        int(node.meta["val"].node.hint) if isinstance(node.meta["val"], torch.SymInt) else places[given.source]
        for node, given in zip(record.module.graph.nodes, record.inputs, strict=False)
    ]
    namespace: dict[str, object] = {}
    exec(explanation.stage("normalise"), namespace)
    (loss,) = namespace["step"](*arguments)
    torch.testing.assert_close(loss, step(model, *values))


def test_explain_runs_nothing() -> None:
    model = Tiny()
    model.to("meta")
    longstraw.explain(step, model, *(t.to("meta") for t in inputs()))


def test_explain_unknown_stage(explanation: longstraw.Explanation) -> None:
    with pytest.raises(ValueError, match="the stages are trace, normalise"):
        explanation.stage("optimise")


def test_explain_without_a_model() -> None:
    with pytest.raises(ValueError, match="contains no model"):
        longstraw.explain(lambda x: x + 1, torch.ones(3))


def test_explain_raises_the_refusal_itself() -> None:
    with pytest.raises(longstraw.LongstrawError, match="hidden values of every token"):
        longstraw.explain(lambda model, ids: model(ids), Tiny(), inputs()[1])


def test_explain_says_that_it_ends_where_the_step_breaks(explanation: longstraw.Explanation) -> None:
    def broken(*args: object) -> torch.Tensor:
        loss = step(*args)
        torch._dynamo.graph_break()
        return loss + step(*args)

    text = str(longstraw.explain(broken, Tiny(), *inputs()))
    assert "not shown: what runs after Dynamo's graph break" in text and "test_explain.py" in text
    assert "not shown" not in str(explanation)


def test_the_law_counts_whole_bytes_per_token(explanation: longstraw.Explanation) -> None:
    assert "/" not in str(explanation.law()).splitlines()[1]
