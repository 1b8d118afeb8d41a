"""One GRPO step on real text, eager and with `backend="longstraw"`: same loss, same gradients, less time and memory.

    python examples/quickstart.py [--quick] [--model PATH | --model-type TYPE] [--limit GIB] [--out FOLDER]

The prompt is a licence and Python's own reference topics, cut at several lengths. A small Qwen3 with random weights
(or a local checkpoint) continues it; a response's reward is how much of the true continuation it hits. Each side takes
its steps in its own process and under the same memory limit. The longest prompt is one that eager can't hold.
Prints one table, saves a plot, and fails if what it claims at the end isn't so.
"""

import argparse
import ctypes
import gc
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch

SIDES = ("eager", "longstraw")
TOLERANCE = 1e-4  # relative L2 of one gradient in float32; the tests hold float64 to 1e-10
SELECTING_TOLERANCE = 1e-3  # the same where keys are selected, see SELECTING
MIB = 2**20


def step(model, prompt, responses, mask, old_logp, advantages):
    """The loss of a GRPO step as anyone writes it. [1, P], [G, R], [G, R], [G, R], [G] -> scalar."""
    num_prompt = prompt.shape[1]
    rows = torch.cat([prompt.expand(responses.shape[0], -1), responses], dim=1)
    logits = model(input_ids=rows, use_cache=False).logits[:, num_prompt - 1 : -1]
    logp = torch.log_softmax(logits.float(), dim=-1).gather(-1, responses[..., None]).squeeze(-1)
    ratio = (logp - old_logp).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return -(gain * mask).sum() / mask.sum()


def random_inputs(*, vocabulary, group, prompt, response):
    """Inputs of the step without a model to sample from."""
    return (
        torch.randint(vocabulary, (1, prompt)),
        torch.randint(vocabulary, (group, response)),
        torch.ones(group, response),
        torch.randn(group, response) * 0.1 - math.log(vocabulary),
        torch.randn(group),
    )


# Real input: a text, responses sampled from the model, a reward.


class Bytes:
    """The tokeniser of the random model: a token is a byte. A response ends at a newline or a full stop."""

    stops = frozenset(b"\n.")

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids)


class Pretrained:
    """The tokeniser of a local checkpoint."""

    def __init__(self, path):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.stops = frozenset({self.tokenizer.eos_token_id} - {None})

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids):
        return self.tokenizer.decode(ids).encode()


SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 65536,
}
MODEL_TYPES = {
    "qwen3": SMALL,
    # three layers of gated delta rule and convolution, one of attention
    "qwen3_5_text": SMALL
    | {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "tie_word_embeddings": False,
    },
    # latent attention, keys selected in every second layer, experts in all layers but the first
    "glm_moe_dsa": SMALL
    | {
        "hidden_size": 96,
        "intermediate_size": 288,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "indexer_types": ["full", "shared"] * 2,
        "index_topk": 64,
        "index_n_heads": 8,
        "index_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}
ALIASES = {"qwen3_5": "qwen3_5_text"}
SELECTING = ("glm_moe_dsa",)
"""Types that attend to the keys that an indexer selects by score. Two things differ for them.

The last key that is selected and the first that isn't may have scores that agree to float32's rounding. Eager and
longstraw multiply in blocks of other shapes, so one of them may take the one key and one the other. With 2048 random
tokens this happened to one query of 34,000, whose two scores were 1e-7 of their value apart, and one gradient moved by
3e-4; with up to 1024 tokens it didn't happen. Neither side is wrong, so the tolerance is wider. Where all choices
agree, as in `sparse_moe_model.py`, gradients are as close as other models'; the tests compare in float64.

Eager builds scores of all pairs of tokens for every head of the indexer, so its memory ends at a quarter of the length.
"""


def load_model(path, model_type="qwen3"):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # that no fast kernels for the CPU are installed
    if path:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    torch.manual_seed(0)
    name = ALIASES.get(model_type, model_type)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **MODEL_TYPES[name])).train()
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data.fill_(-4.0)  # heads that remember for a hundred tokens: fresh ones forget at once
    return model


def load_text():
    """A licence, then Python's reference manual by topic: half a megabyte of plain English that every Python ships."""
    from pydoc_data.topics import topics

    licence = Path(__file__).resolve().parent.parent / "LICENSE"
    return "\n".join([licence.read_text() if licence.exists() else "", *(topics[name] for name in sorted(topics))])


@torch.no_grad()
def sample(model, prompt, *, group, length, stops):
    """Responses to one prompt, right-padded with zeros: ids [G, R], mask [G, R], log-probabilities [G, R]."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    # Newer releases of transformers call this argument "cache".
    names = inspect.signature(model.forward).parameters
    cached = {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}
    for ids in prompt.split(1024, dim=1):
        logits = model(input_ids=ids, logits_to_keep=1, **cached).logits
    for layer in cache.layers:
        repeat(layer, group)
    logits = logits.expand(group, -1, -1)
    ids = torch.zeros(group, length, dtype=torch.long)
    mask, logp = (torch.zeros(group, length, dtype=logits.dtype) for _ in range(2))
    alive = torch.ones(group, dtype=torch.bool)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one token at a time is too little work to share
    for t in range(length):
        scores = torch.log_softmax(logits[:, -1], dim=-1)
        token = torch.multinomial(scores.exp(), 1)
        mask[:, t] = alive
        ids[:, t] = token.squeeze(1) * alive
        logp[:, t] = scores.gather(1, token).squeeze(1) * alive
        alive &= torch.tensor([int(i) not in stops for i in token])
        if t + 1 < length:
            logits = model(input_ids=token, **cached).logits
    torch.set_num_threads(threads)
    return ids, mask, logp


def repeat(layer, group):
    """Give every row of a layer's cache to `group` responses: keys and values, or states of a fixed size."""
    for states in (getattr(layer, name, None) for name in ("conv_states", "recurrent_states")):
        for key in states or ():
            states[key] = None if states[key] is None else states[key].repeat_interleave(group, 0)
    if getattr(layer, "keys", None) is not None:
        layer.batch_repeat_interleave(group)


def reward(response, truth):
    """How well one text hits another, from 0 to 1: F1 of their single characters and of their character pairs."""

    def f1(n):
        a, b = (Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in (response, truth))
        return 2 * (a & b).total() / max(a.total() + b.total(), 1)

    return (f1(1) + f1(2)) / 2


def make_inputs(model, tokens, tokeniser, *, num_prompt, group, length):
    torch.manual_seed(num_prompt)
    prompt = torch.tensor([tokens[:num_prompt]])
    truth = tokeniser.decode(tokens[num_prompt : num_prompt + length])
    responses, mask, old_logp = sample(model, prompt, group=group, length=length, stops=tokeniser.stops)
    rewards = torch.tensor(
        [reward(tokeniser.decode(r[m > 0].tolist()), truth) for r, m in zip(responses, mask, strict=True)]
    )
    assert rewards.std() > 0, "every response got the same reward: nothing to learn from"
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return prompt, responses, mask, old_logp, advantages


# Measuring.


class PeakMemory:
    """Most resident memory inside the `with`, less what was resident on entry: `.bytes`.

    On Linux the kernel keeps the peak; elsewhere a thread looks every few milliseconds.
    """

    def __enter__(self):
        import psutil

        gc.collect()
        self.process = psutil.Process()
        self.linux = sys.platform == "linux"
        if self.linux:
            ctypes.CDLL(None).malloc_trim(0)  # what the allocator kept from earlier work isn't ours
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        else:
            self.done = threading.Event()
            self.thread = threading.Thread(target=self.watch, daemon=True)
            self.thread.start()
        self.baseline = self.peak = self.process.memory_info().rss
        return self

    def watch(self):
        while not self.done.wait(0.005):
            self.peak = max(self.peak, self.process.memory_info().rss)

    def __exit__(self, *exc):
        if self.linux:
            self.peak = proc_status("VmHWM")
        else:
            self.done.set()
            self.thread.join()
        self.bytes = self.peak - self.baseline


def proc_status(key):
    """One of the kernel's counters of this process, in bytes (Linux)."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


def limit_memory(num_bytes):
    """From here on this process can allocate `num_bytes` more and then fails (Linux; elsewhere nothing is enforced)."""
    if sys.platform == "linux":
        import resource

        limit = proc_status("VmData") + num_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def worker(side, folder, args):
    """Take the step at every length; write loss and gradients to `folder`, one line of JSON per length to stdout."""
    torch.set_num_threads(args.threads)
    model = load_model(args.model, args.model_type)
    run = torch.compile(step, backend="longstraw") if side == "longstraw" else step

    def once(inputs):
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        loss = run(model, *inputs)
        loss.backward()
        return loss.item(), time.perf_counter() - start

    first = once(torch.load(folder / "warmup.pt"))[1]
    compile_seconds = first - once(torch.load(folder / "warmup.pt"))[1]
    limit_memory(args.limit)
    for num_prompt in args.lengths:
        inputs = torch.load(folder / f"inputs-{num_prompt}.pt")
        model.zero_grad(set_to_none=True)
        record = {"side": side, "num_prompt": num_prompt, "compile_seconds": compile_seconds}
        try:
            with PeakMemory() as memory:
                loss, seconds = once(inputs)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
                raise
            print(json.dumps(record | {"loss": None}), flush=True)
            continue
        gradients = {name: p.grad for name, p in model.named_parameters()}
        torch.save(gradients, folder / f"{side}-{num_prompt}.pt")
        print(json.dumps(record | {"loss": loss, "seconds": seconds, "bytes": memory.bytes}), flush=True)


def run_worker(side, folder, args, bar):
    """Records of one side by prompt length. Leaves with the worker's own error if it fails."""
    command = [sys.executable, __file__, *args.argv, "--worker", side, "--folder", str(folder)]
    records = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if not line.startswith("{"):
                print(line, end="", file=sys.stderr)
                continue
            record = json.loads(line)
            records[record["num_prompt"]] = record
            bar.update()
    if process.returncode:
        bar.close()
        sys.exit(f"the {side} process failed with status {process.returncode} (its error is above)")
    return records


# Reporting.


def largest_difference(folder, num_prompt):
    """Largest relative L2 difference of a parameter's gradient between the two sides.

    In float32 a gradient that nearly vanishes is rounding noise on either side (the decay of a head that forgets at
    once): below 1e-4 of the largest one a gradient is measured against that.
    """
    eager, ours = (torch.load(folder / f"{side}-{num_prompt}.pt") for side in SIDES)
    assert eager.keys() == ours.keys()
    norms = {name: g.norm().item() for name, g in eager.items() if g is not None}
    floor = 1e-4 * max(norms.values())
    return max((ours[name] - eager[name]).norm().item() / max(norm, floor) for name, norm in norms.items())


def print_table(records, differences, args):
    from tabulate import tabulate

    rows = []
    for num_prompt in args.lengths:
        for side in SIDES:
            r = records[side][num_prompt]
            if r["loss"] is None:
                rows.append([num_prompt, side, f"out of memory at {args.limit / MIB:.0f} MiB", "", "", ""])
                continue
            difference = differences.get(num_prompt) if side == "longstraw" else None
            rows.append(
                [
                    num_prompt,
                    side,
                    f"{r['loss']:+.7f}",
                    "" if difference is None else f"{difference:.1e}",
                    f"{r['seconds']:.2f}",
                    f"{r['bytes'] / MIB:.0f}",
                ]
            )
    headers = ["prompt tokens", "", "loss", "largest gradient difference", "seconds", "peak MiB"]
    print(
        tabulate(
            rows, headers=headers, tablefmt="github", disable_numparse=True, colalign=["right", "left"] + ["right"] * 4
        )
    )


def save_plot(records, args, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    for panel, key, scale, label in (
        (panels[0], "bytes", MIB, "peak memory over baseline, MiB"),
        (panels[1], "seconds", 1, "seconds per step"),
    ):
        for side, colour in zip(SIDES, ("tab:red", "tab:blue"), strict=True):
            done = [r for r in records[side].values() if r["loss"] is not None]
            panel.plot([r["num_prompt"] for r in done], [r[key] / scale for r in done], "o-", color=colour, label=side)
        failed = [n for n, r in records["eager"].items() if r["loss"] is None]
        if key == "bytes":
            panel.axhline(args.limit / MIB, color="grey", linestyle=":", label="limit of both processes")
            panel.plot(failed, [args.limit / MIB] * len(failed), "x", color="tab:red", label="eager: out of memory")
        panel.set(xlabel="prompt tokens", ylabel=label, xscale="log", yscale="log")
        panel.set_xticks(args.lengths, [str(n) for n in args.lengths], rotation=30)
        panel.minorticks_off()
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(
        f"One GRPO step, {args.group} responses of up to {args.response} tokens, {args.threads} CPU threads"
    )
    figure.savefig(path, dpi=120)


def check(records, differences, args):
    """What this demo claims, or an AssertionError."""
    eager, ours = (records[side] for side in SIDES)
    *shared, longest = args.lengths
    for n in shared:
        assert eager[n]["loss"] is not None and ours[n]["loss"] is not None, f"out of memory at {n} prompt tokens"
        assert abs(ours[n]["loss"] - eager[n]["loss"]) <= args.tolerance, f"losses differ at {n} prompt tokens"
        assert differences[n] <= args.tolerance, f"gradients differ by {differences[n]:.1e} at {n} prompt tokens"
    n = shared[-1]
    assert ours[n]["bytes"] < eager[n]["bytes"], f"longstraw takes more memory than eager at {n} prompt tokens"
    assert ours[longest]["loss"] is not None, f"longstraw ran out of memory at {longest} prompt tokens"
    if sys.platform == "linux":
        assert eager[longest]["loss"] is None, f"eager was expected to run out of memory at {longest} prompt tokens"
    speed, memory = (eager[n][key] / ours[n][key] for key in ("seconds", "bytes"))
    print(
        f"Checked: up to {n} prompt tokens every gradient is eager's to {args.tolerance:g} (largest difference "
        f"{max(differences.values()):.1e}). At {n}, longstraw is {speed:.1f} times as fast and takes 1/{memory:.1f} of "
        f"eager's extra memory; in {args.limit / MIB:.0f} MiB it also takes the step at {longest}, where eager can't."
    )


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short prompts, for CI")
    parser.add_argument("--model", metavar="PATH", help="a local checkpoint instead of the small random Qwen3")
    parser.add_argument(
        "--model-type", choices=[*MODEL_TYPES, *ALIASES], default="qwen3", help="which small random model"
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="prompt lengths, the last one too long for eager")
    parser.add_argument("--limit", type=float, metavar="GIB", help="memory that either side may add to its baseline")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--response", type=int, default=64, help="longest response")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the plot")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.argv = argv
    selects = args.model_type in SELECTING
    args.tolerance = SELECTING_TOLERANCE if selects else TOLERANCE
    lengths = [128, 512, 2048] if args.quick else [512, 1024, 2048, 4096, 8192]
    args.lengths = args.lengths or [n // 4 if selects else n for n in lengths]
    args.limit = int((args.limit or (0.375 if args.quick else 2.5)) * 2**30)
    return args


def main(argv):
    args = parse(argv)
    if args.worker:
        worker(args.worker, args.folder, args)
        return
    from tqdm import tqdm

    torch.set_num_threads(args.threads)
    tokeniser = Pretrained(args.model) if args.model else Bytes()
    tokens = tokeniser.encode(load_text())
    model = load_model(args.model, args.model_type)
    longest = args.lengths[-1] + args.response
    assert len(tokens) >= longest, f"the text has {len(tokens)} tokens, {longest} are needed"
    records = {}
    with (
        tempfile.TemporaryDirectory(prefix="longstraw-") as name,
        tqdm(total=3 * len(args.lengths), bar_format="{l_bar}{bar}| {n}/{total} [{elapsed}]") as bar,
    ):
        folder = Path(name)
        bar.set_description("sampling responses")
        for num_prompt in [*args.lengths, 65]:
            inputs = make_inputs(
                model, tokens, tokeniser, num_prompt=num_prompt, group=args.group, length=args.response
            )
            torch.save(inputs, folder / ("warmup.pt" if num_prompt == 65 else f"inputs-{num_prompt}.pt"))
            bar.update(num_prompt != 65)
        for side in SIDES:
            bar.set_description(f"{side} steps".ljust(18))
            records[side] = run_worker(side, folder, args, bar)
        both = [n for n in args.lengths if all(records[side][n]["loss"] is not None for side in SIDES)]
        differences = {n: largest_difference(folder, n) for n in both}
    print_table(records, differences, args)
    print(f"Compiling took {records['longstraw'][args.lengths[0]]['compile_seconds']:.1f} s, once for all lengths.")
    args.out.mkdir(parents=True, exist_ok=True)
    save_plot(records, args, args.out / "quickstart.png")
    print(f"Plot: {args.out / 'quickstart.png'}")
    check(records, differences, args)


if __name__ == "__main__":
    main(sys.argv[1:])
