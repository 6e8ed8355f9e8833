"""The decisions of a conversion, and their reasons."""
