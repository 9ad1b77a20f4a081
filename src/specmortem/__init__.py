"""Executable postmortems of four speculative-decoding incidents in vLLM."""

__version__ = "0.1.0"
