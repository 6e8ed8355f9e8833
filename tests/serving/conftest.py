"""The network that the tests of ``inference`` optimize."""

from inference.conftest import images, net

__all__ = ["images", "net"]
