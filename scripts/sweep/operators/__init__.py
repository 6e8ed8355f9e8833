"""The operator sweep's parts; ``scripts/sweep_operators.py`` runs it."""
