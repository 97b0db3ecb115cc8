"""Training drafters, from prompts to a measured export."""
