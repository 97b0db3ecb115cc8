"""How tokens are drafted, verified and committed."""
