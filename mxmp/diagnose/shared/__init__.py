"""What the reports share: their text, and the networks that they are of."""
