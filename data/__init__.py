"""Text to chat template to token ids and loss mask, to the target's own answers, to features."""
