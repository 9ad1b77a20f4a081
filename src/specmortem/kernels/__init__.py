"""Kernels of the incidents: a plain reference, the faulty form, the fixed form, and a launcher."""

from specmortem._interpreter import mend

mend()
