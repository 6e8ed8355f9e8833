"""The manual's generated pages."""
