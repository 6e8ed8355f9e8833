"""Every network of GluonCV, GluonNLP and MXNet, and layers, with inputs and a loss: ``catalogue.CASES``."""
