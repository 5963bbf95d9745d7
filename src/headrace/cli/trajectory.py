"""`headrace trajectory GROUP_ID`: one group as a person reads it, and what became of it.

Of a member that was tried several times, the latest attempt is shown. Not here: finding the records
(`story`), their way through the topics (`trace`).
"""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from headrace.bus.protocol import Bus
from headrace.cli import options, shown
from headrace.cli.story import Story, gather
from headrace.errors import ConfigError
from headrace.wire import packed


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "group_id", metavar="GROUP_ID", help="e.g. demo-0000042, or demo-0000042/3 for one member"
    )
    parser.add_argument("--tokens", action="store_true", help="also token ids and log-probabilities")
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return options.with_bus(lambda bus, _: _trajectory(bus, args), options.place(args))


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
        print(shown.printable(line))
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
