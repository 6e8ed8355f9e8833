"""One safe step for both frontends: check, then apply or skip, then adjust the loss scale; begin with ``step``."""
