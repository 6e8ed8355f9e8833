"""The catalogue of models that ``dev.py sweep models`` measures, and how it measures one."""
