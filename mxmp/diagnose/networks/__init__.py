"""What the diagnostics may know of a network, by one protocol, and its two implementations."""
