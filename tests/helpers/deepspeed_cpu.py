"""DeepSpeed on the CPU, which Lightning has for CUDA alone: for tests of what is done with it."""

from __future__ import annotations

import argparse
from typing import Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from train.strategies import DeepSpeed


class DeepSpeedOnCPU(DeepSpeed):
    """The same strategy, for processes without a device."""

    def check(self, accelerator: str) -> None:
        """Any place will do."""

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = "gloo"
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        import deepspeed

        engine, divided, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self.local_rank),
            config=self.config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, divided
