"""Networks with an operator that low precision ruins, and healthy ones: what ``audit`` and ``blame`` are tried on."""
