"""Hydra groups, and how the scripts compose them."""
