"""The operator sweep's parts; ``dev.py sweep operators`` runs it."""
