"""Online reinforcement learning from simulated editors, in one process: does the policy learn when to show?

The real engine samples, the real feedback join's rules judge, the real trainer learns; only the log between
them is left out (`headrace demo --online` has it). Before and after are measured on packages that were never
trained on, on the same trials. The same start is trained under other pairs of rewards too: the chance of an
accept at which it begins to show should move with the break-even, reject / (reject - accept).

    python -m benchmarks.online_policy [--steps N] [--plot FILE]
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.page import header, table
from headrace.inference.config import InferenceConfig
from headrace.inference.replica import Replica
from headrace.inference.weights import ServedWeights
from headrace.kernels import invariant
from headrace.policy import checkpoint, dialogue, silence, tree
from headrace.policy.model import ModelConfig, Weights
from headrace.policy.tokenizer import Tokenizer
from headrace.producers import figures, measure, open_files
from headrace.producers.config import EditorsConfig
from headrace.producers.figures import Bin, Change, Interval
from headrace.producers.measure import Answer, Result, Trial
from headrace.streams.suggestion import Rewards, outcome_of
from headrace.trainer import sequence
from headrace.trainer.admission import Unit
from headrace.trainer.advantage import baseline
from headrace.trainer.config import TrainerConfig
from headrace.trainer.learner import learn
from headrace.trainer.state import fresh, published
from headrace.wire.packed import pack_f32, pack_u32
from headrace.wire.records import Rollout, RolloutStep

FLICKER_MS = 100
PAIRS = ((0.75, -0.25), (0.85, -0.15), (0.65, -0.35))
HELD_SEED = 11
"""Of the held-out trials: none of these was looked at while settings were chosen."""
EDGES = (0.0, 0.05, 0.15, 0.25, 0.4, 0.6, 0.8, 1.0)
EDITORS = EditorsConfig(
    function_tokens_max=80,
    kinds={
        "operator": 6.0,
        "constant": 5.0,
        "name": 1.5,
        "expression": 2.0,
        "attribute": 2.0,
        "argument": 0.5,
    },
)
TRAINER = TrainerConfig(lr=5e-5)
START_SHARE = 0.08
START_PLACES = 1024


def judge(rewards: Rewards) -> measure.Judge:
    """The feedback join's rules, with every event in time."""

    def of(answer: Answer) -> tuple[float, float | None]:
        if answer.silent:
            return 0.0, rewards.silent
        outcome = outcome_of(answer.events, answer.text_length, rewards=rewards, flicker_ms=FLICKER_MS)
        return outcome.share, outcome.reward

    return of


def unit(answer: Answer, advantage: float, model: ModelConfig, temperature: float) -> Unit:
    """As the trainer admits it."""
    completion = answer.completion
    prompt = answer.prompt
    step = RolloutStep(
        run="benchmark",
        group_id=answer.trial.name,
        member=0,
        attempt=1,
        step=0,
        last=True,
        source="live",
        base_length=0,
        prefix_length=len(prompt),
        tokens_in=pack_u32(prompt),
        tokens_out=pack_u32(completion.tokens),
        logp=pack_f32(completion.logp),
        loss_mask=b"\1" * len(completion.tokens),
        spans=completion.spans,
        weights_version=completion.weights_version,
        routes=completion.routes,
        routes_shape=completion.routes_shape,
        finish="stop",
        temperature=temperature,
        started_ms=0,
        ended_ms=0,
    )
    rollout = Rollout(member=0, attempt=1, steps=(step,), components={}, reward=0.0)
    return Unit(
        group_id=step.group_id,
        place=step.group_id,
        env="live",
        source="live",
        sequences=(sequence.sequence_of(rollout, model),),
        advantages=(advantage,),
    )


class World:
    """What both sides of the comparison share."""

    def __init__(self, start: Path | None) -> None:
        self.model, seed, self.codec = checkpoint.load_seed()
        self.train, self.heldout = (
            open_files.functions(
                names,
                self.codec,
                tokens_min=EDITORS.function_tokens_min,
                tokens_max=EDITORS.function_tokens_max,
            )
            for names in (EDITORS.distributions, EDITORS.heldout)
        )
        self.start = checkpoint.load(start) if start else self._prepared(seed)

    def _prepared(self, seed: Weights) -> Weights:
        places = open_files.cursors(self.train, EDITORS.kinds, random.Random(0))
        known = [
            silence.Place(cursor.prefix, cursor.suffix, cursor.wanted)
            for _, cursor in zip(range(START_PLACES), places, strict=False)
        ]
        return silence.prepare(
            seed, self.model, self.codec, known, share=START_SHARE, temperature=EDITORS.temperature
        ).weights

    async def measured(
        self, weights: Weights, trials: Sequence[Trial], judged: measure.Judge
    ) -> list[Result]:
        async with Replica(self.model, InferenceConfig()) as replica:
            await replica.install(ServedWeights(version=0, root="measured", tensors=weights))
            answers = await measure.ask(replica, trials, EDITORS, self.codec, run="benchmark")
        return [measure.result(answer, judged) for answer in answers]

    def heldout_trials(self, count: int) -> list[Trial]:
        return measure.trials(self.heldout, EDITORS, count=count, seed=HELD_SEED, name="held")


async def practice(world: World, judged: measure.Judge, steps: int, batch: int, name: str) -> Weights:
    """The weights after `steps` steps on `batch` suggestions each, of the training packages."""
    state, mean = fresh(world.start, {}), None
    async with Replica(world.model, InferenceConfig()) as replica:
        for step in range(steps):
            weights = published(state.masters)
            await replica.install(ServedWeights(version=step, root=f"step {step}", tensors=weights))
            trials = measure.trials(world.train, EDITORS, count=batch, seed=1000 + step, name=f"step-{step}")
            answers = await measure.ask(replica, trials, EDITORS, world.codec, run="benchmark")
            told = [(answer, judged(answer)[1]) for answer in answers]
            kept = [(answer, reward) for answer, reward in told if reward is not None]
            rewards = [reward for _, reward in kept]
            against = sum(rewards) / len(rewards) if mean is None else mean
            units = [
                unit(answer, reward - against, world.model, EDITORS.temperature) for answer, reward in kept
            ]
            mean = baseline(mean, rewards, TRAINER.baseline_rate)
            learned = learn(
                replace(state, step=step), units, model=world.model, config=TRAINER, cancelled=lambda: False
            )
            state = learned.state
            shown = sum(answer.text is not None for answer in answers) / batch
            print(
                f"{name}: step {step + 1}/{steps} shown {shown:.2f} reward {sum(rewards) / batch:+.3f}",
                flush=True,
            )
    return published(state.masters)


@torch.no_grad()
def chances(
    weights: Weights, model: ModelConfig, codec: Tokenizer, trials: Sequence[Trial]
) -> tuple[list[float], list[float]]:
    """Of each trial: the chance that what would be shown is accepted, and the share in which something is
    shown; from the policy's own probabilities, exactly but for what people accept in part."""
    silent = codec.special[silence.SILENT]
    accept, show = [], []
    for start in range(0, len(trials), 32):
        some = trials[start : start + 32]
        groups = [
            tree.Group(
                dialogue.suggestion_prompt_tokens(codec, trial.cursor.prefix, trial.cursor.suffix),
                [dialogue.suggestion_tokens(codec, trial.cursor.wanted), [silent]],
            )
            for trial in some
        ]
        for trial, (fill_T, silent_T) in zip(
            some, tree.tree_logp(weights, model, groups, EDITORS.temperature).logp, strict=True
        ):
            shown = 1 - float(silent_T[0].exp())
            right = min(1.0, float(fill_T.sum().exp()) / max(shown, 1e-6))
            person, stands = trial.person, 1 - EDITORS.habits.undo
            accept.append(stands * (right * person.accept_right + (1 - right) * person.accept_wrong))
            show.append(shown)
    return accept, show


def rows_of(found: Change) -> list[list[object]]:
    return [
        ["suggestions shown per request", found.before.shown, found.after.shown],
        ["accepted of those shown", found.before.accepted, found.after.accepted],
        ["reward per request", found.before.reward, found.after.reward],
    ]


@dataclass(frozen=True)
class Outcome:
    """Of one pair of rewards."""

    rewards: Rewards
    minutes: float
    found: Change
    bins: list[Bin]
    threshold: Interval
    kinds: list[tuple[str, int, float, float]]
    """Kind of place, trials, mean chance of an accept, mean share in which something is shown."""
    neither: tuple[float, float]
    """Of requests before and after: neither silent nor shown, mostly answers without text."""
    threshold_of_kinds: Interval
    """Where each place stands for its kind's mean chance: what a policy can know before it has written."""

    @property
    def name(self) -> str:
        return f"{self.rewards.accepted:+g} / {self.rewards.rejected:+g}"

    @property
    def break_even(self) -> float:
        return self.rewards.rejected / (self.rewards.rejected - self.rewards.accepted)


async def outcome(world: World, rewards: Rewards, steps: int, batch: int, trials: int) -> Outcome:
    """From the start, `steps` steps; before and after on the same trials."""
    held = world.heldout_trials(trials)
    judged = judge(rewards)
    began_s = time.monotonic()
    after = await practice(world, judged, steps, batch, f"{rewards.accepted:+g}")
    minutes = (time.monotonic() - began_s) / 60
    results = [await world.measured(weights, held, judged) for weights in (world.start, after)]
    accept, show = chances(after, world.model, world.codec, held)
    places: dict[str, list[tuple[float, float]]] = {}
    for trial, *both in zip(held, accept, show, strict=True):
        places.setdefault(trial.cursor.kind, []).append((both[0], both[1]))
    kinds = sorted(
        (
            (kind, len(of), *(sum(side) / len(of) for side in zip(*of, strict=True)))
            for kind, of in places.items()
        ),
        key=lambda row: row[2],
    )
    of_kind = {kind: chance for kind, _, chance, _ in kinds}
    return Outcome(
        rewards,
        minutes,
        figures.change(*results),
        figures.bins(accept, show, EDGES),
        figures.threshold(accept, show),
        kinds,
        (_neither(results[0]), _neither(results[1])),
        figures.threshold([of_kind[trial.cursor.kind] for trial in held], show),
    )


def _neither(results: Sequence[Result]) -> float:
    return sum(not (found.shown or found.silent) for found in results) / len(results)


def work(pair: tuple[float, float], start: Path, sizes: tuple[int, int, int]) -> Outcome:
    """One process's share. `sizes`: steps, suggestions a step, trials."""
    torch.set_num_threads(1)
    invariant.warm_up()
    rewards = Rewards(accepted=pair[0], rejected=pair[1])
    return asyncio.run(outcome(World(start), rewards, *sizes))


def told(done: Outcome, steps: int, batch: int, trials: int) -> str:
    rows = [[f"{b.low:g} to {b.high:g}", b.trials, round(b.accept, 3), round(b.show, 3)] for b in done.bins]
    return (
        f"## Rewards {done.name}\n\n{steps} steps of {batch} suggestions, "
        f"{done.minutes:.1f} minutes of practice; {trials} held-out trials.\n\n"
        + table(["", "before", "after"], [*rows_of(done.found), ["neither shown nor silent", *done.neither]])
        + f"\nFewer suggestions: {done.found.fewer}; accept rate higher by: {done.found.higher}; "
        f"reward per request: {done.found.reward}.\n\n"
        + table(["chance of an accept", "trials", "its mean", "shown"], rows)
        + "\n"
        + table(["kind of place", "trials", "chance of an accept", "shown"], [*map(list, done.kinds)])
    )


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Shown by the chance of an accept, a curve a pair, with the break-even and the learned threshold."""
    figure = Figure(figsize=(10, 3.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    places, kinds = figure.subplots(1, 2)
    for done, colour in zip(outcomes, ("#2563a8", "#d9771e", "#3a8f5c"), strict=False):
        label = f"{done.name}: pays from {done.break_even:.2f}"
        points = (
            [(b.accept, b.show) for b in done.bins],
            [(chance, show) for _, _, chance, show in done.kinds],
        )
        for axes, at in zip((places, kinds), points, strict=True):
            axes.plot(*zip(*at, strict=True), marker="o", color=colour, label=label)
            axes.axvline(done.break_even, color=colour, linestyle="--", linewidth=1)
    for axes, of in ((places, "a place"), (kinds, "a kind of places")):
        axes.set(xlabel=f"{of}: chance of an accept", ylabel="shown", ylim=(0, 1))
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=84)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--trials", type=int, default=960)
    parser.add_argument("--rewards", type=float, nargs=2, help="accepted, rejected; all pairs if not given")
    parser.add_argument("--jobs", type=int, default=2, help="pairs at a time, each on one core")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    invariant.warm_up()
    sizes = args.steps, args.batch, args.trials
    with tempfile.TemporaryDirectory() as home:
        start = Path(home) / "start.safetensors"
        checkpoint.save(start, World(None).start)
        pairs = [tuple(args.rewards)] if args.rewards else PAIRS
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            outcomes = list(pool.map(partial(work, start=start, sizes=sizes), pairs))
    print(header("Online learning from simulated editors", "torch"))
    print("\n".join(told(done, *sizes) for done in outcomes))
    print("## The learned threshold\n")
    rows = [[done.name, done.break_even, done.threshold, done.threshold_of_kinds] for done in outcomes]
    print(table(["rewards", "break-even", "shown as often as not at", "the same by kind of place"], rows))
    if args.plot:
        draw(outcomes, args.plot)


if __name__ == "__main__":
    main()
