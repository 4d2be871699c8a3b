"""Imported first where ranks are forked from: no collection looks through what is imported, a seventh of the time."""

import gc

gc.disable()  # until warm.py
