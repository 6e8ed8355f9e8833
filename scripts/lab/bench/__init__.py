"""Benchmarks: steps that take turns, in this process or in one of their own."""
