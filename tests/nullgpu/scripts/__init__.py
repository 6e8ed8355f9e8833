"""Tests of scripts that need the null GPU."""
