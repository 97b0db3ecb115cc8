"""Compare fixed draft lengths with policies that choose them, by the clock.

    python eval/draft_length.py export=outputs/.../export learnt=outputs/.../export policies.confidence.token=0.5

Every way answers each prompt in turns. Prints, for each category of prompts, the speed-up over plain decoding and the
ratio to the fixed length that turned out best there; writes draft_length.json with provenance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from conf.compose import main, plain
from eval.speed import Way, in_turns, interval, our_engine, ratio
from models.errors import UserError

if TYPE_CHECKING:
    from engine.settings import DecodeSettings
    from models.target import Target

_ALL = "all"


def job(config: DictConfig) -> None:
    """Load, time all ways in turns, print and write."""
    options = plain(config)
    lengths = options["lengths"]
    if not isinstance(lengths, list) or not lengths or not all(isinstance(n, int) and n >= 1 for n in lengths):
        raise UserError(f"lengths is {lengths!r}: give whole numbers of at least 1, as [1,2,4].")
    for name, least in (("repeats", 1), ("warm_up", 0)):
        if not isinstance(options[name], int) or options[name] < least:
            raise UserError(f"{name} is {options[name]!r}: it must be a whole number of at least {least}.")
    from data.answers import context_ids
    from data.progress import Progress
    from eval.prompt_sets import prompt_set
    from eval.provenance import provenance
    from models.checkpoint import native
    from models.files import write_json
    from models.target import load_target

    folder = Path(options["export"])
    export = native.read(folder)
    output = Path(options["output"] or folder.parent / f"draft_length-{Path(options['prompts']).stem}")
    write_json(output / "config.json", options)  # before the long work: can it be written?
    target = load_target(**{**export.target["load"], **{k: v for k, v in options["target"].items() if v is not None}})
    target.accelerate()
    ways = all_ways(options, target)
    prompts = prompt_set(options["prompts"], target, options["num_prompts"], options["seed"])
    contexts = [context_ids(target, prompt) for prompt in prompts]
    with Progress("timing", options["warm_up"] + len(prompts)) as progress:
        for context in contexts[: options["warm_up"]]:
            for way in ways:
                way.answer(context)
            progress.advance(1)
        for index, context in enumerate(contexts):
            in_turns(ways, context, options["repeats"], index)
            progress.advance(1)
    rows = summaries(ways, [prompt.category for prompt in prompts])
    print_report(rows)
    write_json(output / "draft_length.json", {"config": options, "ways": rows, "provenance": provenance()})
    print(f"wrote {output / 'draft_length.json'}")


def all_ways(options: dict[str, Any], target: Target) -> list[Way]:
    """Plain decoding, the fixed lengths, the policies, and the learnt one, in this order."""
    from engine.draft_length import Fixed, Learnt, read_policy
    from engine.loop import check_settings
    from engine.options import decode_settings

    most = max(options["lengths"])
    base = decode_settings(options["decode"], float(options["temperature"]), options["seed"], most)
    if not isinstance(base.draft_length, Fixed | None):
        raise UserError("decode.draft_length is what is compared: put a policy of your own under policies.")
    drafter = _load(options["export"], target)
    found: list[tuple[str, Any, DecodeSettings]] = []
    for n in options["lengths"]:
        found.append((f"fixed {n}", drafter, replace(base, num_speculative_tokens=n, draft_length=Fixed())))
    longest = replace(base, num_speculative_tokens=most)
    for name, given in options["policies"].items():
        policy = read_policy(given)
        try:
            if policy is not None:
                policy.check(drafter)
        except UserError as error:
            print(f"without {name}: {error}")
            continue
        found.append((name, drafter, replace(longest, draft_length=policy)))
    if options["learnt"] is not None:
        found.append(("learnt", _load(options["learnt"], target), replace(longest, draft_length=Learnt())))
    for _, current, settings in found:
        check_settings(target, current, settings)
    drafted = [Way(name, our_engine(target, current, settings)) for name, current, settings in found]
    return [Way("plain", our_engine(target, None, base)), *drafted]


def _load(folder: str, target: Target) -> Any:
    from models.checkpoint import native
    from models.drafter import accelerate_drafter

    drafter = native.load(Path(folder), target)
    accelerate_drafter(drafter)
    return drafter


def summaries(ways: Sequence[Way], categories: list[str]) -> list[dict[str, Any]]:
    """Of every way but the first, plain decoding: τ, the mean draft, and ratios for each category and for all prompts.

    `speedup` is over plain decoding; `over_best_fixed` over the fixed length that was fastest in the same category,
    which was chosen on these very prompts, so that it is somewhat flattered.
    """
    groups = {_ALL: list(range(len(categories)))}
    for category in sorted(set(categories)):
        groups[category] = [i for i, c in enumerate(categories) if c == category]
    if len(groups) == 2:  # a single category
        del groups[categories[0]]
    fixed = [way for way in ways if way.name.startswith("fixed ")]
    best = {name: min((part(w, rows) for w in fixed), key=_seconds_per_token) for name, rows in groups.items()}
    plain_ways = {name: part(ways[0], rows) for name, rows in groups.items()}
    result = []
    for way in ways[1:]:
        rounds, tokens = way.total("rounds"), sum(len(a.token_ids) for a in way.answers)
        same = [a.token_ids == b.token_ids for a, b in zip(way.answers, ways[0].answers, strict=True)]
        by_category = {
            name: {
                "prompts": len(rows),
                "speedup": ratio(part(way, rows), plain_ways[name]),
                "best_fixed": best[name].name,
                "over_best_fixed": ratio(part(way, rows), best[name]),
            }
            for name, rows in groups.items()
        }
        result.append(
            {
                "name": way.name,
                "block_efficiency": (tokens - len(way.answers)) / rounds,
                "drafted_per_round": way.total("drafted_tokens") / rounds,
                "identical_to_plain": sum(same),
                "prompts": len(same),
                "by_category": by_category,
            }
        )
    return result


def _seconds_per_token(way: Way) -> float:
    return way.total("total_s") / sum(len(a.token_ids) for a in way.answers)


def part(way: Way, indices: list[int]) -> Way:
    """A way on some of the prompts."""
    return replace(way, answers=[way.answers[i] for i in indices])


def print_report(rows: list[dict[str, Any]]) -> None:
    """Speed-ups, and ratios to the best fixed length, of every way in every category."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=160 if not Console().is_terminal else None)
    categories = rows[0]["by_category"]
    for title, key in (("Speed-up over plain decoding", "speedup"), ("Over the best fixed length", "over_best_fixed")):
        table = Table(title=title)
        for column in ("", "drafted", "τ"):
            table.add_column(column, justify="right" if column else "left")
        for name, found in categories.items():
            table.add_column(f"{name}\n({found['best_fixed']})" if key == "over_best_fixed" else name, justify="right")
        for row in rows:
            cells = [interval(row["by_category"][name][key]) for name in categories]
            table.add_row(row["name"], f"{row['drafted_per_round']:.2f}", f"{row['block_efficiency']:.2f}", *cells)
        console.print(table)
    parted = [row for row in rows if row["identical_to_plain"] < row["prompts"]]
    names = ", ".join(f"{row['name']} {row['identical_to_plain']} of {row['prompts']}" for row in parted)
    told = f"all but for {names}" if parted else "all, of every way"
    console.print(f"Answers identical to plain decoding: {told}.", style="bold red" if parted else None)
    console.print(
        "drafted: tokens per round that could be accepted. Ratios of seconds per token, all ways in turns [95% "
        "bootstrap interval over prompts]. The best fixed length was chosen on these prompts, which flatters it.",
        style="dim",
    )


if __name__ == "__main__":
    main("draft_length", job)
