"""Tests of the simulated GPU, and on it."""
