"""The version, where every file can read it."""

__version__ = "0.2.0"
