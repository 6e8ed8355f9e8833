"""What a conversion decided, and why."""
