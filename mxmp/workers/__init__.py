"""How the launcher starts Python workers: their PYTHONPATH begins with this folder, which has one module."""
