"""The one place that knows Headrace's version."""

__version__ = "0.1.0"
