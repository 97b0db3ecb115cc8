"""Measuring exports: acceptance, speed, parity."""
