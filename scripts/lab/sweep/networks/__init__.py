"""How ``dev.py sweep models`` measures one network of ``support.zoo``."""
