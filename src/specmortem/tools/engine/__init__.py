"""Whole engines: a tiny model with memory, its tasks, and what runs a real vLLM on them.

A room of its own: `engine` holds the small parts of an engine that the postmortems need, this one the engine itself.
"""
