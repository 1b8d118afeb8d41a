"""Train with GRPO, through eager and through longstraw from the same seed: the same curves, and a task that is learned.

    python examples/train_grpo.py [--quick] [--compare-objectives] [--checkpoint FILE] [--out FOLDER]

The task is to follow a map that is written in the prompt. There are 4 places. The prompt is a long list of signs in
random order, one token each ("from 2 to 3"), and every step draws new maps: one round trip through all places. The
prompt ends with the place to start from, and a response names the next three. Its reward is the share of its moves that
a sign of this prompt allows. The model, two layers with random weights, knows neither what a sign means nor that it
should name places: drawing from the whole vocabulary gets one move in 21 right, naming another place at random one in
3. There is no supervised start; a bonus for entropy keeps it trying.

It is trained in float64. In float32 the two sides would differ by rounding, one day a response would be sampled
differently, and from there on two correct runs go different ways. (The model type matters for that too: StarCoder2's
norms compute in the dtype of the model, those of Llama or Qwen in float32 whatever it is.)

Prints both curves, saves a plot, and fails if what it claims at the end isn't so.
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from quickstart import sample

NUM_PLACES = 4
START = NUM_PLACES + NUM_PLACES**2  # the token before the first place; places come first, signs after them
VOCABULARY = START + 1
GROUP = 8  # responses to a prompt
LENGTH = 3  # moves in a response
PROMPTS = 4  # to a batch
UPDATES = 1  # of the weights with a batch
LOSS_TOLERANCE = 1e-8
LEARNED = 0.7  # reward that the full run has to reach
RUNS = {"eager": None, "longstraw": {}, 'longstraw, prompt_grad="none"': {"prompt_grad": "none"}}
NONE = list(RUNS)[2]
GOALS = (0.5, 0.7, 0.85)  # rewards by which the objectives are compared


def step(model, prompt, responses, mask, old_logp, advantages):
    """Loss and entropy of a GRPO step. [1, P], [G, R], [G, R], [G, R], [G] -> scalar, scalar."""
    rows = torch.cat([prompt.expand(responses.shape[0], -1), responses], dim=1)
    logits = model(input_ids=rows, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    every_logp = torch.log_softmax(logits, dim=-1)
    logp = every_logp.gather(-1, responses[..., None]).squeeze(-1)
    entropy = -((every_logp.exp() * every_logp).sum(-1) * mask).sum() / mask.sum()
    ratio = (logp - old_logp).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return -(gain * mask).sum() / mask.sum() - 0.1 * entropy, entropy.detach()


# The task.


def make_prompt(num_prompt):
    """A prompt [1, P], and for each place the one that its map leads to next."""
    tour = torch.randperm(NUM_PLACES)
    following = torch.empty_like(tour)
    following[tour] = tour.roll(-1)
    places = torch.randint(NUM_PLACES, (num_prompt - 2,))
    places[:NUM_PLACES] = torch.arange(NUM_PLACES)  # no place without a sign
    places = places[torch.randperm(num_prompt - 2)]
    signs = NUM_PLACES + places * NUM_PLACES + following[places]
    return torch.cat([signs, torch.tensor([START]), torch.randint(NUM_PLACES, (1,))])[None], following


def reward(prompt, responses, following):
    """Share of the moves that the map allows, [G]. A move from what isn't a place is wrong."""
    before = torch.cat([prompt[:, -1:].expand(responses.shape[0], 1), responses[:, :-1]], 1)
    allowed = torch.cat([following, torch.full((VOCABULARY - NUM_PLACES,), -1)])[before]
    return (responses == allowed).double().mean(1)


def load_model():
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # that no token of the vocabulary is known to begin or end a text
    config = AutoConfig.for_model(
        "starcoder2",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        sliding_window=None,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config).double().train()


# Training. Everything random in a step follows from the seed and the step's number, so a checkpoint holds no generator.


@dataclass
class Training:
    """One run: a model, its optimizer, and the curves so far, a number for each step."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def start(cls, seed):
        torch.manual_seed(seed)
        model = load_model()
        return cls(model, torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01))

    def state_dict(self):
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return parts | {"losses": self.losses, "rewards": self.rewards, "seconds": self.seconds}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.rewards, self.seconds = list(state["losses"]), list(state["rewards"]), state["seconds"]

    def step(self, run, args):
        """Sample a batch, and update the weights with it. `run` is the step, compiled or not."""
        begin = time.perf_counter()
        torch.manual_seed(1_000_000 * (args.seed + 1) + len(self.losses))
        batch, rewards, losses = [], [], []
        for _ in range(PROMPTS):
            prompt, following = make_prompt(args.prompt)
            responses, mask, old_logp = sample(self.model, prompt, group=GROUP, length=LENGTH, stops=frozenset())
            scores = reward(prompt, responses, following)
            advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
            batch.append((prompt, responses, mask, old_logp, advantages))
            rewards.append(scores.mean().item())
        for _ in range(UPDATES):
            self.optimizer.zero_grad()
            for inputs in batch:
                loss, _ = run(self.model, *inputs)
                (loss / PROMPTS).backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        self.losses.append(sum(losses) / len(losses))
        self.rewards.append(sum(rewards) / PROMPTS)
        self.seconds += time.perf_counter() - begin


def save(state, path):
    """Whole or not at all: a run that is stopped while it saves keeps the checkpoint before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_name(path.name + ".new"))
    os.replace(path.with_name(path.name + ".new"), path)


def load(args):
    """What `save` wrote, or an empty start."""
    settings = {"seed": args.seed, "prompt": args.prompt}
    if not (args.checkpoint and args.checkpoint.exists()):
        return {"settings": settings, "runs": {}}
    saved = torch.load(args.checkpoint)
    if saved["settings"] != settings:
        raise SystemExit(f"{args.checkpoint} was made with {saved['settings']}, this run has {settings}")
    return saved


def train(name, run, saved, args, bar):
    """Train one run to `args.steps`, from where its checkpoint ends."""
    training = Training.start(args.seed)
    if name in saved["runs"]:
        training.load_state_dict(saved["runs"][name])
        if len(training.losses) > args.steps:
            raise SystemExit(f"{args.checkpoint} is at step {len(training.losses)}, beyond --steps {args.steps}")
    bar.set_description(name)
    bar.update(len(training.losses))
    while len(training.losses) < args.steps:
        training.step(run, args)
        bar.update()
        bar.set_postfix(reward=f"{mean(training.rewards[-10:]):.2f}")
        if args.checkpoint and (len(training.losses) % 20 == 0 or len(training.losses) == args.steps):
            saved["runs"][name] = training.state_dict()
            save(saved, args.checkpoint)
    return training


def train_in_two_parts(run, args, bar):
    """The same as `train`, with a checkpoint in the middle that another model and another optimizer continue from."""
    bar.set_description("longstraw, interrupted")
    training = Training.start(args.seed)
    with tempfile.TemporaryDirectory(prefix="longstraw-") as folder:
        for _ in range(args.steps // 2):
            training.step(run, args)
            bar.update()
        save(training.state_dict(), Path(folder, "half.pt"))
        training = Training.start(args.seed + 1)  # other weights, so that what isn't loaded shows
        training.load_state_dict(torch.load(Path(folder, "half.pt")))
    while len(training.losses) < args.steps:
        training.step(run, args)
        bar.update()
    return training


# Reporting.


def mean(values):
    return sum(values) / len(values)


def smooth(values, window=10):
    """Means over the last steps."""
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def largest_difference(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def print_table(runs, args):
    from tabulate import tabulate

    marks = [round(args.steps * i / 8) for i in range(1, 9)]
    window = args.steps // 8
    rows = [[name, *(mean(run.rewards[n - window : n]) for n in marks), run.seconds] for name, run in runs.items()]
    headers = [f"reward, mean of {window} steps up to", *map(str, marks), "seconds"]
    print(tabulate(rows, headers=headers, tablefmt="github", floatfmt=[""] + [".3f"] * 8 + [".0f"]))


def save_plot(runs, args, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    styles = ({"color": "tab:red", "linewidth": 4, "alpha": 0.4}, {"color": "tab:blue"}, {"color": "tab:orange"})
    for panel, curve, label in zip(panels, ("rewards", "losses"), ("reward", "loss"), strict=True):
        for (name, run), style in zip(runs.items(), styles, strict=False):
            values = getattr(run, curve)
            panel.plot(range(1, len(values) + 1), smooth(values), label=name, **style)
        panel.set(xlabel="step", ylabel=f"{label}, mean of 10 steps")
        panel.grid(alpha=0.3)
    panels[0].axhline(1 / (NUM_PLACES - 1), color="grey", linestyle=":", label="another place at random")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"GRPO on maps in prompts of {args.prompt} tokens, {PROMPTS} prompts of {GROUP} responses a step")
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def compare(exact, none, args):
    """What the gradients through the prompt did for learning."""
    assert exact.losses != none.losses, 'prompt_grad="none" was expected to train differently'
    goals = " / ".join(map(str, GOALS))
    for name, run in (("exact", exact), ("none", none)):
        curve = smooth(run.rewards)
        reached = " / ".join(next((str(i + 1) for i, r in enumerate(curve) if r >= goal), "never") for goal in GOALS)
        last = mean(run.rewards[-(args.steps // 8) :])
        print(f"{name}: reward {last:.3f} in the last eighth; mean of 10 steps at {goals} first in step {reached}")


def check(runs, again, args):
    """What this example claims, or an AssertionError."""
    eager, ours = runs["eager"], runs["longstraw"]
    loss, gained = (largest_difference(getattr(eager, k), getattr(ours, k)) for k in ("losses", "rewards"))
    print(
        f"largest difference between eager and longstraw in a step: {loss:.1e} of the loss, {gained:.1e} of the reward"
    )
    assert loss <= LOSS_TOLERANCE, f"losses differ by {loss:.1e}"
    assert gained == 0, f"rewards differ by {gained:.1e}: a response was sampled differently"
    assert again.losses == ours.losses and again.rewards == ours.rewards, "the run with a checkpoint went another way"
    if NONE in runs:
        compare(ours, runs[NONE], args)
    first, last = mean(ours.rewards[: args.steps // 8]), mean(ours.rewards[-(args.steps // 8) :])
    wanted = first if args.quick else LEARNED
    assert last > wanted, f"the reward ends at {last:.3f}, more than {wanted:.3f} was expected"
    print(
        f"Checked: in {args.steps} steps longstraw's losses are eager's to {LOSS_TOLERANCE:g} and its rewards are the "
        f"same; the reward rose from {first:.3f} to {last:.3f}; saved, loaded and continued, the run is bit-equal."
    )


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps and a short prompt, for CI")
    parser.add_argument(
        "--compare-objectives", action="store_true", help='also train with prompt_grad="none", another gradient'
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="save all runs to FILE, and continue from it if it exists"
    )
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--prompt", type=int, help="prompt tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the plot")
    args = parser.parse_args(argv)
    args.steps = args.steps or (16 if args.quick else 160)
    args.prompt = args.prompt or (66 if args.quick else 258)
    if args.steps < 8:
        parser.error("--steps has to be 8 or more")
    if args.prompt < NUM_PLACES + 2:
        parser.error(f"--prompt has to be {NUM_PLACES + 2} or more: a sign for each place, and where to start")
    return args


def main(argv=None):
    args = parse(argv)
    from tqdm import tqdm

    torch.set_num_threads(args.threads)
    names = list(RUNS) if args.compare_objectives else ["eager", "longstraw"]
    compiled = {
        name: step if RUNS[name] is None else torch.compile(step, backend="longstraw", options=RUNS[name])
        for name in names
    }
    saved = load(args)
    runs = {}
    with tqdm(total=(len(names) + 1) * args.steps) as bar:
        for name in names:
            runs[name] = train(name, compiled[name], saved, args, bar)
        again = train_in_two_parts(compiled["longstraw"], args, bar)
    print_table(runs, args)
    path = args.out / "train_grpo.png"
    save_plot(runs, args, path)
    print(f"Plot: {path}")
    check(runs, again, args)


if __name__ == "__main__":
    main(sys.argv[1:])
