"""Experiments: the arms of each incident, as functions that `isolation` runs in processes of their own.

A room beside `probes`: a probe judges one subject on one input, an experiment runs a program on a device under a
configuration and reports what happened.
"""
