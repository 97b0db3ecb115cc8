"""How Lightning divides a training among processes, where that is more than copies: FSDP2 and DeepSpeed.

A strategy of conf/trainer is one of Lightning's; these add what drafters need. `check` refuses a place before long work
starts. `divide` takes its part of a training module and of its target; within `whole` the module's weights can be read
on every process, and process 0 may use it alone. `shares_target` says that every forward pass of the target is one of
all processes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from models.errors import UserError
from models.target import Target
from train.checkpoints import check_archive
from train.processes import PATIENCE

_STEPS_FILE = "steps.json"
_HELD = -1  # among the modules that use a weight, whose numbers DeepSpeed counts from 0


class FullySharded(ModelParallelStrategy):
    """FSDP2: weights, gradients and optimizer states of the drafter are divided, and gathered for each step's losses.

    With `shard_target` the frozen target's layers are divided too while the drafter trains, and gathered one by one in
    every forward pass. Then all processes measure together. Checkpoints are one file, with what a single process would
    write, so that any number of processes goes on from them.
    """

    def __init__(self, shard_target: bool = False) -> None:
        super().__init__(save_distributed_checkpoint=False, timeout=PATIENCE)
        self.shares_target = shard_target

    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def divide(self, module: nn.Module, target: Target) -> None:
        """Divide the weights of a training module, and the target's layers where they are to be."""
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = self.device_mesh["data_parallel"]
        for layer in target.layers if self.shares_target else []:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            # What is gathered into is made here: made in inference mode, it could be used there alone.
            layer.unshard()  # type: ignore[operator]
            layer.reshard()  # type: ignore[operator]
        self._class = module.__class__
        fully_shard(module, mesh=mesh)
        register_fsdp_forward_method(module, "training_step")

    def check_module(self, module: Any) -> None:
        """Raise UserError where the target is trained with the drafter."""
        refuse_trained_target(module, "fsdp")

    def reunite(self, module: nn.Module, target: Target) -> None:
        """Give every process whole weights again, those of the target too."""
        divided = list(_divided(module))
        _replace(divided, _whole)
        for owner, *_ in divided:  # what else would look for divided parameters
            owner._load_state_dict_post_hooks.clear()
        del module.training_step
        module.__class__ = self._class
        for layer in target.layers if self.shares_target else []:
            layer.set_reshard_after_forward(False)  # type: ignore[operator]
            layer.unshard()  # type: ignore[operator]

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Within, plain tensors stand in the divided parameters' places; what is written to them is lost."""
        divided = list(_divided(module))
        _replace(divided, _whole)
        try:
            yield
        finally:
            for owner, name, parameter in divided:
                owner._parameters[name] = parameter  # type: ignore[assignment]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return {name: _full(value) for name, value in self.lightning_module.state_dict().items()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        ours = self.lightning_module.state_dict()
        like = {name: _like(value, ours.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(like, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = _mapped(optimizer.state_dict(), _full)
        return state

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            divided = {
                index: {key: _like(value, parameters[index]) for key, value in known.items()}
                for index, known in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": divided})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)


def refuse_trained_target(module: Any, trainer: str) -> None:
    """Raise UserError where a training module trains its target too, whose weights it does not own."""
    if module.target.trained:
        raise UserError(
            f"trainer={trainer} divides the weights of the drafter alone, and drafter.training.backbone.by="
            f"{module.backbone.by} trains the target too: use trainer=ddp."
        )


def _parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, parameter


def _divided(module: nn.Module) -> Iterator[tuple[nn.Module, str, DTensor]]:
    for owner, name, parameter in _parameters(module):
        if isinstance(parameter, DTensor):
            yield owner, name, parameter


def _replace(places: list[tuple[nn.Module, str, Any]], change: Callable[[Any], nn.Parameter]) -> None:
    """Put `change`(parameter) in every place; what was shared stays so."""
    made: dict[int, nn.Parameter] = {}
    for owner, name, parameter in places:
        if id(parameter) not in made:
            made[id(parameter)] = change(parameter)
        owner._parameters[name] = made[id(parameter)]


def _whole(parameter: DTensor) -> nn.Parameter:
    return nn.Parameter(parameter.full_tensor().detach(), requires_grad=parameter.requires_grad)


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def _full(value: Any) -> Any:
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def _like(value: Any, ours: Any) -> Any:
    """A whole tensor divided as `ours` is."""
    if isinstance(value, Tensor) and isinstance(ours, DTensor) and value.shape == ours.shape:
        return distribute_tensor(value.to(ours.device), ours.device_mesh, ours.placements)
    return value


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return change(value)


class DeepSpeed(DeepSpeedStrategy):
    """ZeRO 2 (gradients and optimizer states divided) or 3 (weights too), by `stage`.

    The target is whole on every process: no pass of it goes through DeepSpeed. In stage 3 the drafter's weights are
    gathered for each step's losses, which read them out of their modules' passes. A checkpoint is a folder that as many
    processes can go on from. Raises UserError where the package is not installed.
    """

    shares_target = False

    def __init__(self, stage: int = 2, offload_optimizer: bool = False) -> None:
        if stage not in (2, 3):
            raise UserError(f"trainer.strategy.stage is {stage}: choose 2 or 3.")
        try:
            super().__init__(
                stage=stage,
                offload_optimizer=offload_optimizer,
                logging_batch_size_per_gpu=1,  # only for its log; Lightning looks for a batch sampler otherwise
                timeout=PATIENCE,
            )
        except (ImportError, MisconfigurationException) as error:
            raise UserError('trainer=deepspeed needs a package: pip install -e ".[deepspeed]".') from error
        assert isinstance(self.config, dict)
        self.config["zero_force_ds_cpu_optimizer"] = False  # or it offloads optimizers of its own alone

    def check(self, accelerator: str) -> None:
        """Raise UserError without CUDA, for which alone Lightning has DeepSpeed."""
        if accelerator == "cpu" or not torch.cuda.is_available():
            raise UserError(
                "trainer=deepspeed needs CUDA devices, and trainer.accelerator is "
                f"{accelerator}: use trainer=ddp or trainer=fsdp with trainer.accelerator=cpu, or trainer=cpu."
            )

    def check_module(self, module: Any) -> None:
        """Raise UserError where the target is trained with the drafter."""
        refuse_trained_target(module, "deepspeed")

    def divide(self, module: nn.Module, target: Target) -> None:
        """Remember the weights' dtype, which DeepSpeed changes by its own mixed precision."""
        self._dtype = next(module.parameters()).dtype

    def reunite(self, module: nn.Module, target: Target) -> None:
        """Leave plain weights of the dtype that they had."""
        if self.zero_stage_3:
            with self.whole(module):
                _replace(list(_parameters(module)), _copy)
            self._drop_hooks()
        module.to(self._dtype)

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Within, all weights are on every process, and its passes are its own: stage 3 meets in each module's."""
        if not self.zero_stage_3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            offload = self._drop_hooks()
            try:
                yield
            finally:
                offload._register_deepspeed_module(offload.module)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """In stage 3, gather all weights first, and hold them up to the optimizer's step."""
        if self.zero_stage_3:
            assert self.lightning_module is not None
            weights: list[Any] = list(self.lightning_module.parameters())
            weights[0].all_gather(param_list=weights)  # those that are away
            for weight in weights:
                weight.ds_active_sub_modules.add(_HELD)
        return super().training_step(*args, **kwargs)

    @property
    def _offload(self) -> Any:
        optimizer: Any = self.deepspeed_engine.optimizer
        return optimizer.parameter_offload

    def _drop_hooks(self) -> Any:
        offload = self._offload
        for hooks in (offload.forward_hooks, offload.backward_hooks):
            for hook in hooks:
                hook.remove()
            hooks.clear()
        return offload

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write beside the last checkpoint, which is dropped once this one is complete."""
        path = Path(self.broadcast(str(filepath)))
        fresh, old = _beside(path, "new"), _beside(path, "old")
        if self.is_global_zero:
            shutil.rmtree(fresh, ignore_errors=True)
        self.barrier()
        super().save_checkpoint(checkpoint, fresh, storage_options)
        self.barrier()
        if self.is_global_zero:
            told = {"global_step": checkpoint["global_step"], "processes": self.world_size}
            (fresh / _STEPS_FILE).write_text(json.dumps(told))
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                path.rename(old)
            fresh.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        self.barrier()


def restore_name(checkpoint: Path) -> None:
    """Give DeepSpeed's last checkpoint its name back, where all ended while the next one was to get it."""
    if not checkpoint.exists() and _beside(checkpoint, "old").exists():
        _beside(checkpoint, "old").rename(checkpoint)


def steps_in(checkpoint: Path, processes: int) -> int:
    """The optimizer steps behind DeepSpeed's checkpoint, a folder.

    Raises UserError where it is damaged, and where another number of processes wrote it.
    """
    try:
        for file in sorted(checkpoint.rglob("*.pt")):
            check_archive(file)
        told = json.loads((checkpoint / _STEPS_FILE).read_text())
    except (UserError, OSError, ValueError) as error:
        raise UserError(
            f"{str(checkpoint)!r} is damaged: {error} Delete the folder {str(checkpoint.parent)!r}, and the same "
            "command trains again from the first step. The answers are kept."
        ) from error
    if told["processes"] != processes:
        raise UserError(
            f"{str(checkpoint)!r} was written by {told['processes']} processes of DeepSpeed, and these are "
            f"{processes}: start it again with as many, or choose another run_name."
        )
    return int(told["global_step"])


def _beside(checkpoint: Path, which: str) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.{which}")
