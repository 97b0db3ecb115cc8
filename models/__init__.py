"""What a target and a drafter are: modules and pure functions."""
