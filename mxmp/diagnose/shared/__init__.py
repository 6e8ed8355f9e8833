"""What the diagnostics share: the texts of their reports, and the networks of both frontends."""
