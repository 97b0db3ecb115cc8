"""Several processes that train as one: how they start, who does what alone, and what is added up over all of them.

Every process runs the same command from its beginning. Process 0 makes the data, measures, and writes files; the others
wait for it. Of each batch a process has its own rows (`StepBatches.part`). What a mean is divided by is counted over
all of them (`share`), so that the mean of the processes' gradients is the gradient of the whole batch.

The functions see the process group that `launch` opened. Without one they are those of a single process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from models.errors import UserError

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # for process 0, which makes data and measures while the others wait
_LAUNCHED_BY = "DRAFTSMITH_LAUNCHED_BY"


def launch(trainer: Mapping[str, Any]) -> None:
    """Start as many processes as `trainer` (conf/trainer) asks for, or meet those that torchrun or SLURM started.

    Does nothing where a single one is asked for. The others' prints are dropped, and those that were started here end
    with this one. Raises UserError where the processes cannot be had.
    """
    if not wants_several(trainer):
        return
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    on_gpu = trainer["accelerator"] != "cpu" and torch.cuda.is_available()
    started_by = os.environ.setdefault(_LAUNCHED_BY, str(os.getpid()))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    place = {key: trainer[key] for key in ("accelerator", "devices", "num_nodes")}
    try:
        Fabric(strategy=DDPStrategy(process_group_backend=backend, timeout=PATIENCE), **place).launch()
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"trainer: {str(error).strip().splitlines()[0]}") from error
    if rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if started_by == str(os.getppid()):
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def wants_several(trainer: Mapping[str, Any]) -> bool:
    """Whether `trainer` is for a group of processes, if only of one."""
    single = trainer["devices"] in (1, "1") and trainer["num_nodes"] == 1
    return not single or trainer["strategy"] is not None


def _end_with(parent: int) -> None:
    """End this process once its parent has ended, in whatever way: in a collective it would wait for long."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextmanager
def first() -> Iterator[None]:
    """What is within is done by process 0, and then by the others, which find on the disk what it left there.

    None goes on before all are done. Where it fails in process 0, which says why, the others end.
    """
    if rank():
        _hear()
        yield
    else:
        done = False
        try:
            yield
            done = True
        finally:
            _tell(done)
    if count() > 1:
        dist.barrier()


def told(work: Callable[[], T]) -> T:
    """What `work` gives in process 0, which does it alone. Where it fails, the others end."""
    if rank():
        result: T = _hear()
        return result
    done, found = False, None
    try:
        found = work()
        done = True
    finally:
        _tell(done, found)
    return found


def _tell(done: bool, value: Any = None) -> None:
    if count() > 1:
        with suppress(*([] if done else [RuntimeError])):  # where the others have ended as well
            dist.broadcast_object_list([done, value], src=0)


def _hear() -> Any:
    message = [False, None]
    dist.broadcast_object_list(message, src=0)
    if not message[0]:
        sys.exit(2)
    return message[1]


def dismiss_others() -> None:
    """The others' work is done: they end here, and process 0 is alone from now on."""
    if not dist.is_available() or not dist.is_initialized():
        return
    alone = rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    if not alone:
        sys.exit(0)


@overload
def share(number: int) -> float: ...
@overload
def share(number: Tensor) -> Tensor: ...
def share(number: int | Tensor) -> float | Tensor:
    """What this process divides its sum over `number` rows by: an equal share of all processes' rows, of at least 1.

    The mean over processes of sum / share is then the mean over all rows.
    """
    if isinstance(number, Tensor):
        total = number if count() == 1 else total_of(number)
        return total.clamp(min=1) / count() if count() > 1 else total.clamp(min=1)
    if count() == 1:
        return max(1, number)
    return max(1, int(total_of(torch.tensor(number)))) / count()


def total_of(numbers: Tensor) -> Tensor:
    """The sum over processes of tensors of one shape."""
    total = numbers.clone()
    if count() > 1:
        dist.all_reduce(total)
    return total


@torch.no_grad()
def means(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The means over processes of every tensor; all of them have None at the same places."""
    given = [t for t in tensors if t is not None]
    if count() == 1 or not given:
        return list(tensors)
    whole = total_of(torch.cat([t.flatten() for t in given])) / count()
    parts = iter(whole.split([t.numel() for t in given]))
    return [None if t is None else next(parts).view_as(t) for t in tensors]


def gathered(value: T) -> list[T]:
    """What every process gave, by rank."""
    if count() == 1:
        return [value]
    found: list[Any] = [None] * count()
    dist.all_gather_object(found, value)
    return found


def drawn_for_all(shape: Sequence[int], generator: torch.Generator, device: torch.device | None = None) -> Tensor:
    """Uniform numbers of `shape`, whose first dimension is rows: those that one process would draw for its rows."""
    parts = count()
    whole = torch.rand((shape[0] * parts, *shape[1:]), generator=generator, device=device)
    return whole[rank() :: parts]


@torch.no_grad()
def agree(module: torch.nn.Module) -> None:
    """Give all processes the parameters and buffers that process 0 has."""
    if count() > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
