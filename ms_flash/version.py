"""The version of the package: its one home, read by setup.py too."""

__version__ = "0.1.0"
