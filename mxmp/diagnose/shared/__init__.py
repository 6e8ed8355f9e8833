"""The parts that the tools share: the texts of reports, and networks of both frontends."""
