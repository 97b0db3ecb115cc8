"""How every script reads its command line: Hydra composes, and whatever is wrong is said in one sentence."""

from __future__ import annotations

import difflib
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.help import text as help_text
from models.errors import Terminated, UserError

ROOT = Path(__file__).parent
GROUPS_TO_ADD = {
    "train": ("experiment", "drafter", "adaptation"),
    "parity": ("parity",),
}  # groups without a default, by configuration
# Groups within a section, which Hydra chooses from by decode/draft_length=NAME.
_NESTED = ("decode.draft_length", "data.generator")


def main(config_name: str, job: Callable[[DictConfig], Any]) -> None:
    """Run `job` with the configuration that `conf/<config_name>.yaml` and the command line make.

    A user's mistake ends the process with its sentence and exit code 2; anything unexpected with code 1, and its
    traceback under `debug=true`; an interruption with 130, SIGTERM with 143.
    """
    sys.argv[1:] = _with_choices(sys.argv[1:])
    given = get_args_parser().parse_args(sys.argv[1:])
    if given.help:
        document, added = sys.modules[job.__module__].__doc__ or "", GROUPS_TO_ADD.get(config_name, ())
        print(help_text(ROOT, config_name, document, given.overrides, added))
        return
    try:
        if not (given.multirun or given.shell_completion):  # a value may be a list of values to try, or no setting
            explain_overrides(config_name, given.overrides)
    except UserError as error:
        _fail(str(error), 2)

    def guarded(config: DictConfig) -> Any:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("models").setLevel(logging.INFO)  # what takes long while a target is fetched
        try:
            with _terminable():
                return job(config)
        except UserError as error:
            if config.get("debug"):
                raise
            _fail(str(error), 2)
        except Terminated:
            _fail("Ended by SIGTERM. The same command goes on where it stopped.", 143)
        except KeyboardInterrupt:
            _fail("Interrupted. The same command goes on where it stopped.", 130)
        except Exception as error:
            if config.get("debug"):
                raise
            _fail(f"Unexpected {type(error).__name__}: {error} (debug=true shows where)", 1)

    hydra.main(version_base="1.3", config_path=str(ROOT), config_name=config_name)(guarded)()


def choices(group: str) -> dict[str, str]:
    """The options of a group, each with the first comment in its file."""
    found = {}
    for path in sorted((ROOT / group).glob("*.yaml")):
        comments = [line for line in path.read_text().splitlines() if line.startswith("#") and "@package" not in line]
        found[path.stem] = comments[0].lstrip("# ") if comments else ""
    return found


def plain(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration as plain containers. Raises UserError where a mandatory value (???) is missing."""
    try:
        result = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"The configuration lacks a value: {str(error).splitlines()[0]}.") from error
    assert isinstance(result, dict)
    return {str(key): value for key, value in result.items()}


def given_settings() -> set[str]:
    """The keys that the command line of this job sets, as "drafter.model.num_layers"; none outside a job."""
    if not HydraConfig.initialized():
        return set()
    return {re.split("[=@]", override.lstrip("+~"))[0] for override in HydraConfig.get().overrides.task}


def composed(config_name: str, overrides: list[str]) -> dict[str, Any]:
    """What conf/<config_name>.yaml and the overrides make; inside a Hydra job as well."""
    with _composing():
        return plain(hydra.compose(config_name, overrides=overrides))


@contextmanager
def _terminable() -> Iterator[None]:
    """Within, SIGTERM raises Terminated, so that what is half written is removed."""

    def end(number: int, frame: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _with_choices(arguments: list[str]) -> list[str]:
    """The same, but names that nested groups were given as if they were values are written as choices, and come first.

    A setting of the chosen option may stand before the choice.
    """
    chosen, others = [], []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in _NESTED and re.match(r"\w", value):
            chosen.append(f"{key.replace('.', '/')}={value}")
        else:
            others.append(argument)
    return chosen + others


def _fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def explain_overrides(config_name: str, overrides: list[str]) -> None:
    """Raise UserError where the overrides cannot be composed: the first that is wrong, and what was probably meant.

    Inside a Hydra job as well.
    """
    overrides = [o for o in overrides if not o.lstrip("+~").startswith("hydra")]
    with _composing():
        with suppress(HydraException, OmegaConfBaseException):
            hydra.compose(config_name, overrides=overrides)
            return
        good: list[str] = []
        for override in overrides:
            if "=" not in override and not override.startswith("~"):
                raise UserError(f"{override!r} is no setting: write NAME=VALUE.")
            try:
                hydra.compose(config_name, overrides=[*good, override])
                good.append(override)
            except MissingConfigException as error:
                group, _, wanted = (error.missing_cfg_file or "").rpartition("/")
                raise UserError(
                    f"{group or 'configuration'} {wanted!r} does not exist.{_nearest(wanted, choices(group))}"
                ) from error
            except (HydraException, OmegaConfBaseException) as error:
                known = list(_keys(hydra.compose(config_name, overrides=good)))
                raise UserError(_reason(override, error, known)) from error


@contextmanager
def _composing() -> Iterator[None]:
    """Hydra set up to compose from `conf`. A job's own Hydra is put aside meanwhile: there is only one at a time."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = running


def _reason(override: str, error: Exception, known: list[str]) -> str:
    key = re.split(r"[=@]", override.lstrip("+~"))[0]
    text = str(error)
    if any(key in groups for groups in GROUPS_TO_ADD.values()) and not override.startswith("+"):
        return f"Write +{override}: {key!r} is added, not overridden."
    if "is not in struct" in text or "Could not override" in text or "Could not find" in text:
        return f"There is no setting {key!r}.{_nearest(key, known)}"
    if "Multiple values" in text:
        return f"{key!r} is set twice."
    return f"Cannot apply {override!r}: {text.splitlines()[0]}"


def _nearest(word: str, known: dict[str, str] | list[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    if not close and isinstance(known, list):  # the right name in the wrong section
        close = [k for k in known if k.rsplit(".", 1)[-1] == word.rsplit(".", 1)[-1]][:1]
    listed = f" Choose one of: {', '.join(known)}." if isinstance(known, dict) else ""
    return (f" Did you mean {close[0]!r}?" if close else "") + listed


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        path = f"{prefix}{key!s}"
        yield path
        child = config._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _keys(child, f"{path}.")
