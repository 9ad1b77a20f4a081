"""The counts of a V1 runner: how they are copied and moved, and what a step makes of them."""
