"""The network that the tests of ``inference`` optimize."""

from inference.conftest import failing, full, images, net

__all__ = ["failing", "full", "images", "net"]
