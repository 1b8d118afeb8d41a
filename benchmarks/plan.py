"""What steps take against what was planned for them: models x prompts x groups x memory budgets, on the CPU.

    python benchmarks/plan.py            # a table
    python benchmarks/plan.py --check    # the same, fails where a step takes less than 0.6 or more than 1.1 of its plan

Bytes are those of live tensors, weights and inputs among them, counted operator by operator.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from quickstart import MIB, load_model, random_inputs, step

import longstraw
from longstraw import backend
from longstraw.runtime.live_bytes import LiveBytes

MODELS = ("qwen3", "qwen3_5", "glm_moe_dsa")
SHAPES = ((512, 8, 64), (2048, 2, 64))  # prompt, group, response
FRACTIONS = (1.0, 0.5)  # of what the step takes without a budget
LEAST, MOST = 0.6, 1.1


def measure(model, inputs, budget):
    """Bytes that a step with a budget takes at its peak, and its seconds, without compiling."""
    torch._dynamo.reset()
    live, run_step = LiveBytes(), backend.run_step

    def counted(*args):  # Dynamo compiles nothing under a mode, so it begins inside of what was compiled
        with live:
            return run_step(*args)

    backend.run_step = counted
    try:
        compiled = torch.compile(step, backend="longstraw", options={"memory_budget": budget})
        compiled(model, *inputs).backward()
        model.zero_grad()
        live.restart()
        start = time.perf_counter()
        loss = compiled(model, *inputs)
        with live:
            loss.backward()
        seconds = time.perf_counter() - start
    finally:
        backend.run_step = run_step
    given = [*model.parameters(), *model.buffers(), *inputs]
    return live.peak + sum(x.numel() * x.element_size() for x in given), seconds


def settings(names):
    """(model's name, prompt, group, budget, planned bytes, plan, measured bytes, seconds) for every setting."""
    for name, (prompt, group, response) in itertools.product(names, SHAPES):
        torch.manual_seed(0)
        model = load_model(None, name)
        inputs = random_inputs(vocabulary=model.config.vocab_size, group=group, prompt=prompt, response=response)
        explanation = longstraw.explain(step, model, *inputs, options={"memory_budget": 1 << 60})
        whole = explanation.estimate().peak
        for fraction in FRACTIONS:
            budget = int(whole * fraction)
            estimate = explanation.estimate(memory_budget=budget)
            yield name, prompt, group, budget, estimate, *measure(model, inputs, budget)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 if a step doesn't take what was planned"
    )
    return parser.parse_args(argv)


def main(argv):
    from tabulate import tabulate
    from tqdm import tqdm

    args = parse(argv)
    torch.set_num_threads(2)
    rows, kept = [], True
    total = len(args.models) * len(SHAPES) * len(FRACTIONS)
    for name, prompt, group, budget, estimate, measured, seconds in tqdm(settings(args.models), total=total):
        ratio = measured / estimate.peak
        kept &= LEAST <= ratio <= MOST
        sizes = [f"{x / MIB:.1f}" for x in (budget, estimate.peak, measured)]
        rows.append([name, prompt, group, *sizes, estimate.plans[0].span_tokens, f"{ratio:.2f}", f"{seconds:.1f}"])
    headers = ["model", "P", "G", "budget, MiB", "planned, MiB", "measured, MiB", "span", "measured/planned", "seconds"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    return int(args.check and not kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
