"""The protocol for modules."""
