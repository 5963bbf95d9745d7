"""`headrace trajectory GROUP_ID`: one group as a person reads it, and what became of it.

Reads the group's own partition of each topic, and the ledger. Of a member that was tried several times, the
latest attempt is shown.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.bus.protocol import Bus, TopicPartition, partition_of
from headrace.cli import options, shown
from headrace.errors import ConfigError, WireError
from headrace.wire import packed
from headrace.wire import records as r
from headrace.wire.codec import decode
from headrace.wire.topics import EXPERIENCE, PROMPTS, REWARDS, ROLLOUT_STEPS, TRAIN_STEPS


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "group_id", metavar="GROUP_ID", help="e.g. demo-0000042, or demo-0000042/3 for one member"
    )
    parser.add_argument("--tokens", action="store_true", help="also token ids and log-probabilities")
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return options.with_bus(lambda bus, _: _trajectory(bus, args), options.place(args))


@dataclass(slots=True)
class Story:
    """All that the log holds about one group."""

    group_id: str
    prompt: r.Prompt | None = None
    steps: list[r.RolloutStep] = field(default_factory=list)
    rewards: list[r.Reward] = field(default_factory=list)
    failures: list[r.GroupFailed] = field(default_factory=list)
    experience: r.Experience | None = None
    trained_in: r.TrainStep | None = None
    undecodable: list[str] = field(default_factory=list)

    def members(self) -> list[int]:
        known = {step.member for step in self.steps} | {reward.member for reward in self.rewards}
        return sorted(known | set(range(self.prompt.group_size if self.prompt else 0)))

    def latest(self, member: int) -> list[r.RolloutStep]:
        """The steps of a member's newest attempt, in order, each once."""
        own = [step for step in self.steps if step.member == member]
        attempt = max((step.attempt for step in own), default=0)
        return list(
            {step.step: step for step in sorted(own, key=_by_step) if step.attempt == attempt}.values()
        )

    def rewards_of(self, member: int) -> list[r.Reward]:
        own = [reward for reward in self.rewards if reward.member == member]
        attempt = max((reward.attempt for reward in own), default=0)
        return list({reward.component: reward for reward in own if reward.attempt == attempt}.values())

    def fate(self, member: int | None = None) -> str:
        """What became of the group, or of one member of it."""
        if self.trained_in is None:
            if self.experience is not None:
                why = f" ({self.experience.reason})" if self.experience.reason else ""
                return f"closed: {self.experience.closed}{why}; not yet read by the trainer"
            if self.failures:
                return f"given up by a worker ({self.failures[-1].reason}); not yet closed"
            return "in flight"
        step = self.trained_in.step
        dropped = [drop for drop in self.trained_in.drops if drop.group_id == self.group_id]
        if self.group_id in self.trained_in.admitted:
            withheld = {drop.member: drop.reason for drop in dropped if drop.member is not None}
            if member is not None and member in withheld:
                return f"read in step {step}; tokens withheld: {withheld[member]}"
            return f"trained in step {step} (weights v{self.trained_in.version_to})"
        reasons = sorted({drop.reason for drop in dropped if drop.member is None})
        return f"dropped in step {step}: {', '.join(reasons) or 'no reason recorded'}"


def _by_step(step: r.RolloutStep) -> int:
    return step.step


async def gather(bus: Bus, group_id: str) -> Story:
    """Everything about `group_id`. Raises ConfigError when the log knows nothing of it."""
    story = Story(group_id)
    topics = await bus.topics()
    for name in (PROMPTS.name, ROLLOUT_STEPS.name, REWARDS.name, EXPERIENCE.name):
        if name in topics:
            tp = TopicPartition(name, partition_of(group_id.encode(), len(topics[name])))
            await _read(bus, tp, story, lambda key: key == group_id.encode())
    if TRAIN_STEPS.name in topics:
        await _read(bus, TopicPartition(TRAIN_STEPS.name, 0), story, lambda key: True)
    if not (story.prompt or story.steps or story.rewards or story.experience):
        raise ConfigError(f"group {group_id!r}: expected records of it on this bus, found none")
    return story


async def _read(bus: Bus, tp: TopicPartition, story: Story, wanted: Callable[[bytes | None], bool]) -> None:
    begin, end = (await bus.begins([tp.topic]))[tp], (await bus.ends([tp.topic]))[tp]
    async for delivery in bus.read_range(tp, begin, end):
        if not wanted(delivery.key) or delivery.value is None:
            continue
        try:
            record = decode(tp.topic, delivery.value, delivery.headers)
        except WireError as error:
            story.undecodable.append(f"{delivery.place}: {error}")
            continue
        match record:
            case r.Prompt():
                story.prompt = story.prompt or record
            case r.RolloutStep():
                story.steps.append(record)
            case r.Reward():
                story.rewards.append(record)
            case r.GroupFailed():
                story.failures.append(record)
            case r.Experience():
                story.experience = story.experience or record
            case r.TrainStep():
                consumed = any(unit.group_id == story.group_id for unit in record.consumed)
                if story.trained_in is None and consumed:
                    story.trained_in = record


async def _trajectory(bus: Bus, args: argparse.Namespace) -> int:
    group_id, _, member = args.group_id.partition("/")
    if member and not member.isdecimal():
        raise ConfigError(f"group {args.group_id!r}: expected GROUP_ID or GROUP_ID/MEMBER")
    story = await gather(bus, group_id)
    if member and int(member) not in story.members():
        raise ConfigError(f"group {group_id!r}: expected a member of {story.members()}, got {member}")
    chosen = [int(member)] if member else story.members()
    if args.json:
        options.print_json(_document(story, chosen))
        return 0
    decoder = _decoder()
    for line in text(story, chosen, decoder, tokens=args.tokens):
        print(line)
    return 0


def text(
    story: Story, members: Iterable[int], decode_tokens: Callable[[list[int]], str], *, tokens: bool = False
) -> list[str]:
    """The story in lines."""
    lines = [f"group {story.group_id}"]
    if story.prompt is not None:
        lines += [
            f"  task      {story.prompt.task_id} ({story.prompt.env})",
            f"  admitted  {shown.clock(story.prompt.admitted_ms)}, v{story.prompt.weights_version}, "
            f"{story.prompt.group_size} members, region {story.prompt.region}",
        ]
    lines.append(f"  fate      {story.fate()}")
    lines += [f"  failure   attempt {f.attempt}: {f.reason}" for f in story.failures]
    lines += [f"  bad       {place}" for place in story.undecodable]
    first = next((step for step in story.steps if step.step == 0), None)
    if first is not None:
        lines += ["  prompt", *_prompt(decode_tokens(packed.unpack_u32(first.tokens_in)))]
    for member in members:
        lines += ["", *_member(story, member, decode_tokens, tokens)]
    return lines


def _member(story: Story, member: int, decode_tokens: Callable[[list[int]], str], tokens: bool) -> list[str]:
    steps = story.latest(member)
    attempts = len({step.attempt for step in story.steps if step.member == member})
    again = f", {attempts} attempts, the latest shown" if attempts > 1 else ""
    lines = [f"  member {member}: {story.fate(member)}{again}"]
    for step in steps:
        versions = ", ".join(f"{s.start}-{s.end} v{s.weights_version}" for s in step.spans)
        out = packed.unpack_u32(step.tokens_out)
        lines.append(
            f"    turn {step.step}  {len(out)} tokens ({versions}) in "
            f"{shown.duration(step.ended_ms - step.started_ms)}, by {step.worker or '-'}"
        )
        lines += [f"      model   {line}" for line in decode_tokens(out).splitlines() or [""]]
        if step.tool_call is not None:
            arguments = ", ".join(f"{name}={value!r}" for name, value in step.tool_call.arguments.items())
            lines.append(f"      call    {step.tool_call.name}({arguments})")
        if step.tool_result:
            lines += [f"      result  {line}" for line in step.tool_result.splitlines()]
        if tokens:
            lines.append(f"      ids     {out}")
            lines.append(f"      logp    {[round(value, 3) for value in packed.unpack_f32(step.logp)]}")
        if step.last:
            lines.append(f"      finish  {step.finish}")
    if not steps:
        lines.append("    no step has arrived")
    for reward in story.rewards_of(member):
        judged = "quarantine" if reward.verdict == "quarantine" else f"{reward.value:g}"
        note = f"  {reward.evidence}" if reward.evidence else ""
        lines.append(f"    reward {reward.component} = {judged} ({reward.grader or 'unnamed'}){note}")
    return lines


def _document(story: Story, members: Iterable[int]) -> dict[str, Any]:
    import msgspec

    def plain(record: Any) -> Any:
        return shown.readable(msgspec.to_builtins(record, builtin_types=(bytes,)), full=True)

    return {
        "group_id": story.group_id,
        "fate": story.fate(),
        "trained_in_step": story.trained_in.step if story.trained_in else None,
        "prompt": plain(story.prompt) if story.prompt else None,
        "failures": [plain(failure) for failure in story.failures],
        "members": [
            {
                "member": member,
                "fate": story.fate(member),
                "steps": [plain(step) for step in story.latest(member)],
                "rewards": [plain(reward) for reward in story.rewards_of(member)],
            }
            for member in members
        ],
    }


def _decoder() -> Callable[[list[int]], str]:
    """Tokens to text with the shipped tokenizer, laid out as source again."""
    from importlib.resources import files
    from pathlib import Path

    from headrace.policy import tokenizer

    path = Path(str(files("headrace.policy") / "seed" / "tokenizer.json"))
    return tokenizer.load(path).decode


def _prompt(source: str) -> list[str]:
    """The prompt laid out as source again, the hole shown as `____`."""
    from headrace.policy.source import restore

    bare = source.replace("<|task|>", "").replace("<|turn|>", "").replace("<|hole|>", " ____")
    return [f"    {line}" for line in restore(bare).splitlines()]
