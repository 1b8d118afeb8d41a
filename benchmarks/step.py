"""One GRPO step of a 6-layer Qwen3 on the CPU: eager, longstraw, and bare forwards of the prompt, side by side.

    python benchmarks/step.py --prompt 2048 --group 8     # one comparison
    python benchmarks/step.py                             # every measurement behind the promises below
    python benchmarks/step.py --check                     # the same, fails if a promise is missed

Time is the least of the repeats in one process; peak memory (over what was resident with the model built and everything
compiled and warmed up) is that of one run in another. README.md beside this file says how to read the output.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from quickstart import MIB, PeakMemory, step

RESPONSE, SHORT_RESPONSE, RAGGED_MEAN = 64, 16, 512
LAYERS = 6
KV_BYTES = 2 * 2 * 32 * 4  # of one token in one layer: keys and values, 2 heads of 32, float32


# What one process measures.


@dataclass(frozen=True)
class Job:
    """One measurement. `what`: eager, exact, none (longstraw's prompt_grad), forwards, compile, short, or ragged."""

    what: str
    prompt: int = 0
    group: int = 8
    layers: int = LAYERS
    repeats: int = 2

    def __str__(self):
        return " ".join([self.what, *(f"{k[0].upper()}={v}" for k, v in self.__dict__.items() if k in KEYS and v)])


KEYS = ("prompt", "group", "layers")


def build_model(layers):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=65536,
    )
    return Qwen3ForCausalLM(config)


def make_inputs(prompt, group, response=RESPONSE):
    torch.manual_seed(prompt + group)
    return (
        torch.randint(0, 8192, (1, prompt)),
        torch.randint(0, 8192, (group, response)),
        torch.ones(group, response),
        torch.randn(group, response) * 0.1 - 9,
        torch.randn(group),
    )


def make_call(job, model):
    """A function of (prompt tokens, responses) that does the job's work once and returns its seconds."""
    if job.what == "forwards":

        @torch.no_grad()
        def forwards(prompt, group):
            ids = make_inputs(prompt, group)[0]
            start = time.perf_counter()
            for _ in range(4):
                model.model(input_ids=ids, use_cache=False)
            return time.perf_counter() - start

        return forwards
    run = step
    if job.what != "eager":
        options = {"prompt_grad": "none" if job.what == "none" else "exact"}
        run = torch.compile(step, backend="longstraw", options=options)

    def train(prompt, group):
        inputs = make_inputs(prompt, group)
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        run(model, *inputs).backward()
        return time.perf_counter() - start

    return train


def measure(job):
    """Seconds and peak bytes of one step (or of four forwards)."""
    model = build_model(job.layers)
    call = make_call(job, model)
    call(65, 3)
    call(130, 2)
    seconds, peaks = [], []
    for _ in range(job.repeats):
        model.zero_grad(set_to_none=True)
        with PeakMemory() as memory:
            seconds.append(call(job.prompt, job.group))
        peaks.append(memory.bytes)
    return {"seconds": min(seconds), "bytes": min(peaks), "all_seconds": seconds, "all_bytes": peaks}


def measure_compile(job):
    """Seconds that compiling adds to the first call, and that a new prompt length adds to the first call with it."""
    from torch._dynamo.utils import counters

    call = make_call(job, build_model(job.layers))
    make_call(Job("eager"), build_model(1))(64, 2)  # torch's own first call isn't compile time
    first = call(64, 2) - call(64, 2)
    graphs = counters["stats"]["unique_graphs"]
    new_length = min(call(n, 2) - call(n, 2) for n in (96, 128, 161))
    return {"first": first, "new_length": new_length, "recompiled": counters["stats"]["unique_graphs"] - graphs}


def measure_short(job):
    """Seconds of a step with many short responses over those of one eager pass over the same tokens in one row."""
    model = build_model(job.layers)
    run = torch.compile(step, backend="longstraw")
    inputs = make_inputs(job.prompt, job.group, SHORT_RESPONSE)
    tokens = torch.cat([inputs[0], inputs[1].reshape(1, -1)], 1)
    responses = inputs[1].reshape(1, -1, 1)

    def packed():
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=responses.shape[1] + 1).logits[:, :-1]
        logp = torch.log_softmax(logits, -1).gather(-1, responses)
        return -(logp - logp.detach()).exp().mean()

    def seconds(compute):
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        compute().backward()
        return time.perf_counter() - start

    def ours():
        return run(model, *inputs)

    seconds(ours)
    pairs = [(seconds(ours), seconds(packed)) for _ in range(job.repeats)]
    return {"ratio": statistics.median(a / b for a, b in pairs), "all_seconds": pairs}


def measure_ragged(job):
    """Seconds of a step whose responses are half padding over those of one with as many tokens and no padding."""
    model = build_model(job.layers)
    run = torch.compile(step, backend="longstraw")
    longest = 2 * RAGGED_MEAN
    lengths = torch.linspace(0, longest, 2 * job.group + 1)[1::2]  # their mean is half of the longest
    ragged, even = make_inputs(job.prompt, job.group, longest), make_inputs(job.prompt, job.group, RAGGED_MEAN)
    mask = (torch.arange(longest) < lengths[:, None]).float()

    def seconds(inputs):
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        run(model, *inputs).backward()
        return time.perf_counter() - start

    padded = (*ragged[:2], mask, *ragged[3:])
    seconds(padded)
    pairs = [(seconds(padded), seconds(even)) for _ in range(job.repeats)]
    return {"ratio": statistics.median(a / b for a, b in pairs), "all_seconds": pairs}


# All measurements, and what they have to show.


OTHER_FIGURES = {"compile": measure_compile, "short": measure_short, "ragged": measure_ragged}


def promised_jobs(repeats):
    eager = [Job("eager", 2048, repeats=1)]
    ours = [Job("exact", n, repeats=repeats) for n in (2048, 4096, 8192, 16384)]
    none = [Job("none", n, repeats=repeats) for n in (2048, 8192)]
    forwards = [Job("forwards", n, repeats=repeats) for n in (2048, 8192)]
    groups = [Job("exact", 4096, group=n, repeats=repeats) for n in (2, 16)]
    compiled = [Job("compile", layers=n) for n in (4, LAYERS, 8, 16)]
    short = [Job("short", 512, group=64, repeats=15 * repeats)]
    ragged = [Job("ragged", 512, repeats=5 * repeats)]
    return eager + ours + none + forwards + groups + compiled + short + ragged


def promises(results):
    """(promise, measured, bound as text, kept) for each, from the results of `promised_jobs`."""
    by_name = {(job.what, job.prompt, job.group, job.layers): result for job, result in results.items()}

    def get(what, prompt=0, group=8, layers=LAYERS):
        return by_name[what, prompt, group, layers]

    eager, ours = get("eager", 2048), get("exact", 2048)
    speed, memory = eager["seconds"] / ours["seconds"], eager["bytes"] / ours["bytes"]
    forwards = get("exact", 8192)["seconds"] / get("forwards", 8192)["seconds"]
    none = get("exact", 8192)["seconds"] / get("none", 8192)["seconds"]
    growth = get("exact", 16384)["bytes"] - get("exact", 4096)["bytes"]
    state = (16384 - 4096) * LAYERS * KV_BYTES * 2  # state and its gradients, both float32
    group = get("exact", 4096, 16)["bytes"] / get("exact", 4096, 2)["bytes"] - 1
    compiled = {n: get("compile", layers=n) for n in (4, LAYERS, 8, 16)}
    first = compiled[LAYERS]["first"]
    again, recompiled = (max(r[key] for r in compiled.values()) for key in ("new_length", "recompiled"))
    linear = compiled[16]["first"] / compiled[8]["first"]
    short, ragged = get("short", 512, 64)["ratio"], get("ragged", 512)["ratio"]
    return [
        ("P=2048: times as fast as eager", f"{speed:.2f}", ">= 6", speed >= 6),
        ("P=2048: eager's extra memory over longstraw's", f"{memory:.2f}", ">= 6", memory >= 6),
        ("P=8192: time over four no-grad forwards of the prompt", f"{forwards:.2f}", "< 1.3", forwards < 1.3),
        ('P=8192: times as fast with prompt_grad="none"', f"{none:.2f}", ">= 2.5", none >= 2.5),
        (
            "P=4096 to 16384: growth over bytes of state and its gradients",
            f"{growth / state:.2f} ({growth / MIB:.0f} MiB)",
            f"<= 1.3 ({1.3 * state / MIB:.0f} MiB)",
            growth <= 1.3 * state,
        ),
        ("G=2 to 16 at P=4096: growth of extra memory", f"{100 * group:.1f} %", "< 2 %", group < 0.02),
        ("first compilation, 6 layers", f"{first:.1f} s", "< 20 s", first < 20),
        ("a new prompt length adds", f"{again:.2f} s", "< 0.1 s", again < 0.1),
        ("graphs compiled for new prompt lengths", f"{recompiled}", "0", recompiled == 0),
        ("G=64 of 16 tokens: time over one eager pass of all tokens", f"{short:.2f}", "<= 1.15", short <= 1.15),
        ("responses that are half padding: time over as many tokens", f"{ragged:.2f}", "<= 1.25", ragged <= 1.25),
        # Towards 2 if compile time is linear in layers, towards 4 if it is quadratic.
        ("compile time of 16 layers over that of 8", f"{linear:.2f}", "<= 2.2", linear <= 2.2),
    ]


# Running and reporting.


def run_job(job, threads):
    """Seconds and bytes of a job: by a process each, the second of which holds on to no block that was freed."""
    timed = run_process(job, threads)
    if job.what in OTHER_FIGURES:
        return timed
    counted = run_process(replace(job, repeats=1), threads, MALLOC_MMAP_THRESHOLD_=str(256 << 10))
    return {**timed, "bytes": counted["bytes"], "bytes_with_heap": timed["bytes"]}


def run_process(job, threads, **environment):
    command = [sys.executable, __file__, "--threads", str(threads), "--worker", json.dumps(job.__dict__)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    if done.returncode:
        sys.exit(f"{job}: the process failed with status {done.returncode} (its error is above)")
    return json.loads(done.stdout.splitlines()[-1])


def print_steps(results):
    from tabulate import tabulate

    names = {"exact": "longstraw", "none": 'longstraw, prompt_grad="none"', "forwards": "four no-grad forwards"}
    rows = []
    for job, r in sorted(results.items(), key=lambda item: (item[0].prompt, item[0].group)):
        if job.what in OTHER_FIGURES:
            continue
        eager = next(
            (results[j] for j in results if (j.what, j.prompt, j.group) == ("eager", job.prompt, job.group)), {}
        )
        ratios = [
            f"{eager[key] / r[key]:.1f}" if eager and job.what in ("exact", "none") else ""
            for key in ("seconds", "bytes")
        ]
        numbers = [f"{r['seconds']:.2f}", f"{r['bytes'] / MIB:.0f}", *ratios]
        rows.append([job.prompt, job.group, names.get(job.what, job.what), *numbers])
    headers = ["P", "G", "", "seconds", "peak MiB", "times as fast", "times less memory"]
    align = ["right", "right", "left"] + ["right"] * 4
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True, colalign=align))


def print_compile(results):
    from tabulate import tabulate

    rows = [
        [job.layers, f"{r['first']:.2f}", f"{r['new_length']:.3f}", r["recompiled"]]
        for job, r in results.items()
        if job.what == "compile"
    ]
    headers = ["layers", "first compilation, s", "new prompt length, s", "graphs compiled for it"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, help="compare at this prompt length only")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=("eager", "exact", "none", "forwards"), help="with --prompt")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a promise is missed")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("out/benchmark.json"), help="where the numbers go")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.prompt and args.check:
        parser.error("--check needs every measurement: leave --prompt out")
    return args


def main(argv):
    args = parse(argv)
    if args.worker:
        torch.set_num_threads(args.threads)
        job = Job(**json.loads(args.worker))
        print(json.dumps(OTHER_FIGURES.get(job.what, measure)(job)))
        return 0
    from tabulate import tabulate
    from tqdm import tqdm

    if args.prompt:
        kinds = args.only or ("eager", "exact", "none", "forwards")
        jobs = [Job(what, args.prompt, args.group, repeats=args.repeats) for what in kinds]
    else:
        jobs = promised_jobs(args.repeats)
    results = {}
    with tqdm(jobs, bar_format="{l_bar}{bar}| {n}/{total} [{elapsed}]") as bar:
        for job in bar:
            bar.set_description(str(job))
            results[job] = run_job(job, args.threads)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    report = [{**job.__dict__, **result} for job, result in results.items()]
    args.json.write_text(json.dumps({"torch": torch.__version__, "threads": args.threads, "jobs": report}, indent=1))
    print_steps(results)
    if args.prompt:
        return 0
    print()
    print_compile(results)
    table = promises(results)
    rows = [[promise, measured, bound, "kept" if kept else "MISSED"] for promise, measured, bound, kept in table]
    print("\n" + tabulate(rows, headers=["promise", "measured", "bound", ""], tablefmt="github", disable_numparse=True))
    return int(args.check and not all(kept for *_, kept in table))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
