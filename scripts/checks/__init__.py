"""Checks that need no benchmark and end with an error."""
