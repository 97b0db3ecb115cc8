"""One drafter in two engines: ours, and another that loads what it was exported as.

    python eval/parity.py export=outputs/A/export format=vllm_eagle engine=vllm
    python eval/parity.py export=outputs/B/export format=hf_causal_lm engine=transformers
    python eval/parity.py +parity=small

In float32 at temperature 0 the answers, and the drafts,
drafted and accepted tokens of every prompt, must be equal (`eval.rounds` has what engines count); at temperature 1 the
accepted counts must have one law. Prints a table, writes parity.json, and ends with exit code 1 where a case fails. A
case that passed is not run again, unless something that it depends on has changed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from conf.compose import main, plain
from models.errors import UserError

if TYPE_CHECKING:
    from eval.engines import Task
    from eval.rounds import Trace
    from models.target import Target

ENGINES = ("vllm", "transformers", "reference")


@dataclass(frozen=True, slots=True)
class Case:
    """One export in one format in one engine, at one temperature."""

    export: str
    format: str | None
    files: str | None
    engine: str
    temperature: float
    source_format: str | None = None

    @property
    def drafter(self) -> str:
        """The run that made the export."""
        folder = Path(self.export).resolve()
        return folder.parent.name if folder.name == "export" else folder.name

    @property
    def name(self) -> str:
        """What the case is called in files and messages."""
        return "-".join([self.drafter, self.engine, self.format or "files", f"T{self.temperature:g}"])


def cases(options: dict[str, Any]) -> list[Case]:
    """The one case of `options`, or those that its `cases` make of it. Raises UserError for senseless ones."""
    keys = [f.name for f in fields(Case)]
    found = []
    for changes in [{}] if options["cases"] is None else options["cases"]:
        if not isinstance(changes, dict) or not changes.keys() <= set(keys):
            raise UserError(f"cases has {changes!r}: give mappings of {', '.join(keys)}.")
        case = Case(**{key: changes.get(key, options[key]) for key in keys})
        if case.export is None:
            raise UserError("There is no export to compare: give export=FOLDER, or a list of cases.")
        for name in ("export", "source_format", "format", "files"):
            if not isinstance(value := getattr(case, name), str | None):
                raise UserError(f"{name} is {value!r}: give one, or a list of cases.")
        if case.engine not in ENGINES:
            raise UserError(f"engine is {case.engine!r}: choose {', '.join(ENGINES)}.")
        if case.files is not None and case.format is None:
            raise UserError(f"files={case.files} needs the format that it is in: format=NAME.")
        if not isinstance(case.temperature, int | float) or case.temperature < 0:
            raise UserError(f"temperature is {case.temperature!r}: it must be 0 or more.")
        if case.temperature > 0 and case.engine != "vllm":
            raise UserError(
                f"engine={case.engine} is compared at temperature 0: sampled answers are compared with engine=vllm."
            )
        pairs = options["num_prompts"] * options["samples"]
        if case.temperature > 0 and 2.0 ** (1 - pairs) >= options["significance"]:
            raise UserError(
                f"{pairs} answers (num_prompts · samples) are too few to tell two laws apart at significance "
                f"{options['significance']}: take more samples."
            )
        found.append(case)
    names = [case.name for case in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"Two cases are called {twice[0]}: give each an output of its own, in a command of its own.")
    if not found:
        raise UserError("cases is empty: there is nothing to compare.")
    return found


def job(config: DictConfig) -> None:
    """Run all cases, print and write; exit code 1 where one fails."""
    if not run(plain(config)):
        sys.exit(1)


def check_vllm(python: str) -> None:
    """Raise UserError where there is no interpreter of vLLM's environment."""
    if not Path(python).expanduser().is_file():
        raise UserError(
            f"engine=vllm needs vLLM's own virtual environment, and there is no interpreter {python!r}: run "
            "`make vllm-env` (3.5 GB, some minutes), or name one by vllm.python=FOLDER/bin/python."
        )


def run(options: dict[str, Any]) -> bool:
    """All cases of `options`; True where all of them pass."""
    wanted = cases(options)
    if any(case.engine == "vllm" for case in wanted):
        check_vllm(options["vllm"]["python"])
    from eval.engines import refuse_unreadable
    from eval.parity_table import print_parity
    from eval.provenance import provenance
    from models.files import write_json

    for case in wanted:
        refuse_unreadable(case.engine, case.format)
    output = Path(options["output"] or Path(wanted[0].export).parent / "parity")
    write_json(output / "config.json", options)
    bench = Bench(options, output)
    for case in wanted:
        bench.prepare(case)
    results = [bench.result(case) for case in wanted]
    print_parity(results)
    write_json(output / "parity.json", {"cases": results, "config": options, "provenance": provenance()})
    print(f"wrote {output / 'parity.json'}")
    return all(result["passed"] for result in results)


class Bench:
    """Runs cases, and keeps what several of them need: targets, drafters, prompts, and the rounds of our own engine."""

    def __init__(self, options: dict[str, Any], output: Path) -> None:
        self.options, self.output = options, output
        self._opened: dict[tuple[str, str | None], Opened] = {}
        self._traces: dict[tuple[str, str | None, float, bool, bool], list[Trace]] = {}
        self._folders: dict[Case, Path | None] = {}
        self._keys: dict[Case, str | None] = {}

    def prepare(self, case: Case) -> None:
        """Open and write what a case needs: one that cannot be run is refused before any other is. Raises UserError."""
        from eval.engines import options_without_files
        from eval.parity_key import key_of

        self._keys[case] = key_of(asdict(case), self.options)
        if self._passed(case) is not None:
            return
        opened = self._open(case)
        if case.format is None:
            options_without_files(case.engine, opened.drafter, opened.num_speculative_tokens)
        self._folders[case] = self._files(case, opened)

    def result(self, case: Case) -> dict[str, Any]:
        """What the case showed now, or before: one that passed is not run again while nothing has changed.

        What goes wrong while it runs is its result, so that the others are run and shown; `debug` raises it.
        """
        from eval.parity_verdict import broken
        from models.files import write_json

        before = self._passed(case)
        if before is not None:
            print(f"{case.name}: passed before")
            return before
        print(f"{case.name} ...", flush=True)
        try:
            told = self._compare(case)
        except Exception as error:
            if self.options["debug"]:
                raise
            told = broken(error)
        result = {"name": case.name, "drafter": case.drafter, **asdict(case), "key": self._keys[case], **told}
        write_json(self._path(case), result)
        return result

    def _path(self, case: Case) -> Path:
        return self.output / "cases" / f"{case.name}.json"

    def _passed(self, case: Case) -> dict[str, Any] | None:
        """What the case showed when it passed, if that was with the same of everything."""
        path, key = self._path(case), self._keys[case]
        before: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return before if before is not None and key is not None and before["key"] == key and before["passed"] else None

    def _open(self, case: Case) -> Opened:
        """The target, drafter and prompts of an export."""
        key = (case.export, case.source_format)
        if key not in self._opened:
            self._opened[key] = open_export(Path(case.export), case.source_format, self.options)
        return self._opened[key]

    def _compare(self, case: Case) -> dict[str, Any]:
        from eval.engines import Task, point_masses, run_reference, run_transformers, samples, vllm_runner

        opened, options = self._open(case), self.options
        contexts, seeds = samples(opened.contexts, 1 if case.temperature == 0 else options["samples"], options["seed"])
        task = Task(
            target=opened.target,
            drafter=self._drafter(case, opened),
            folder=self._folders[case],
            format=case.format,
            contexts=contexts,
            seeds=seeds,
            max_new_tokens=options["max_new_tokens"],
            num_speculative_tokens=opened.num_speculative_tokens,
            temperature=case.temperature,
            stop=opened.target.stop_token_ids,
        )
        runners = {
            "vllm": vllm_runner(options["vllm"], self._work(case)),
            "transformers": run_transformers,
            "reference": run_reference,
        }
        made = runners[case.engine](task)
        traces = self._ours(case, task, point_masses(task, case.engine))
        from eval.parity_verdict import at_zero, sampled
        from eval.rounds import count

        ours = [
            count(
                found,
                made.rule,
                max_new_tokens=task.max_new_tokens,
                positions=task.num_speculative_tokens,
                stop=task.stop,
            )
            for found in traces
        ]
        judge = at_zero if case.temperature == 0 else sampled
        told = judge(task, ours, made.counts, options)
        return {
            **told,
            "num_speculative_tokens": task.num_speculative_tokens,
            "draft_vocab_size": task.drafter.vocab.size,
            "versions": made.versions,
        }

    def _drafter(self, case: Case, opened: Opened) -> Any:
        """Our own, over all of the target's tokens where the other engine proposes them from such a format."""
        from models.checkpoint import is_widened, widened

        if case.format is None or not is_widened(case.format, opened.drafter):
            return opened.drafter
        whole = opened.target.vocab_size
        print(
            f"{case.name}: both engines propose all {whole:,} tokens, the drafter itself {opened.drafter.vocab.size:,}"
        )
        return widened(case.format, opened.drafter, opened.export.model, opened.target)

    def _work(self, case: Case) -> Path:
        """A folder for what the case needs beside its result."""
        folder = self.output / "work" / case.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _files(self, case: Case, opened: Opened) -> Path | None:
        """The folder that the other engine loads: the one that is given, or the export written in the format.

        Raises UserError that names what is wrong with a folder that is given, as far as its files tell.
        """
        from models.checkpoint import NATIVE, format_of, is_inside_target

        if case.format is None:
            return None
        if case.format == NATIVE:
            return Path(case.files or case.export)
        module, folder = format_of(case.format), self._work(case) / case.format
        if case.files is not None:
            module.load(Path(case.files), opened.target)
            return Path(case.files)
        more = {"stitch": True} if case.engine == "vllm" and is_inside_target(case.format) else {}
        module.save(opened.drafter, opened.target, opened.export, folder, f"# {case.name}\n", **more)
        return folder

    def _ours(self, case: Case, task: Task, point_mass: bool) -> list[Trace]:
        """The rounds of our engine, which are the same for all formats of an export."""
        from data.progress import Progress
        from engine.settings import DecodeSettings
        from eval.rounds import trace
        from models.sampling import SamplingParams

        key = (case.export, case.source_format, case.temperature, point_mass, task.drafter.vocab.reduced)
        if key not in self._traces:
            found = []
            with Progress("our engine", len(task.contexts)) as progress:
                for context, seed in zip(task.contexts, task.seeds, strict=True):
                    settings = DecodeSettings(
                        max_new_tokens=task.max_new_tokens,
                        num_speculative_tokens=task.num_speculative_tokens,
                        sampling=SamplingParams(case.temperature),
                        seed=seed,
                    )
                    found.append(trace(task.target, task.drafter, context, settings, point_mass=point_mass))
                    progress.advance(1)
            self._traces[key] = found
        return self._traces[key]


@dataclass(frozen=True, slots=True)
class Opened:
    """An export, its target in float32, its drafter in our engine, and the prompts that both engines answer."""

    export: Any
    target: Target
    drafter: Any
    contexts: list[list[int]]
    num_speculative_tokens: int


def open_export(folder: Path, format_name: str | None, options: dict[str, Any]) -> Opened:
    """Load an export and its target; `format_name` is null where the export's format is to be detected.

    Raises UserError for what cannot be loaded or compared.
    """
    from data.answers import context_ids
    from eval.engines import room_for
    from eval.prompt_sets import prompt_set
    from models.checkpoint import detect, target_options
    from models.target import load_target
    from models.types import max_depth

    layout = detect(folder, format_name, "source_format")
    export = layout.read(folder)
    load = target_options(export, options["target"], folder)
    target = load_target(**{**load, "dtype": "float32"})
    drafter = layout.load(folder, target)
    size = options["num_speculative_tokens"] or export.num_speculative_tokens
    size = min(size, max_depth(drafter) or size)
    room = target.max_positions - room_for(options["max_new_tokens"], size)
    prompts = prompt_set(options["prompts"], target, options["num_prompts"], options["seed"])
    contexts = [ids for ids in (context_ids(target, prompt) for prompt in prompts) if len(ids) <= room]
    if len(contexts) < len(prompts):
        print(f"{len(prompts) - len(contexts)} of {len(prompts)} prompts leave no room for an answer: left out")
    if not contexts:
        raise UserError(f"No prompt leaves room for max_new_tokens={options['max_new_tokens']} in {target.name!r}.")
    return Opened(export, target, drafter, contexts, size)


if __name__ == "__main__":
    main("parity", job)
