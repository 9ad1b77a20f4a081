"""Draft proposers, written once against the device interface."""
