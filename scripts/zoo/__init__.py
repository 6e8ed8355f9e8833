"""The catalogue of models that ``sweep_models.py`` measures, and how it measures one."""
