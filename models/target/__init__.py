"""The frozen target model."""

from models.target.load import load_target
from models.target.target import Target, TargetOutput

__all__ = ["Target", "TargetOutput", "load_target"]
