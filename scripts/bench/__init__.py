"""What ``bench_models.py`` runs: the networks, the process of one variant, and how processes take turns."""
