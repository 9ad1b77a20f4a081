"""The counts of a V1 runner: who owns them, how they are copied, and what a step makes of them."""
