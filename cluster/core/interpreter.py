"""Settings of Python's interpreter for processes whose event loop answers clients while threads compute."""

SWITCH_S = 0.0005
"""Seconds after which a thread that computes gives the interpreter to the event loop (`sys.setswitchinterval`).

Python's default is 5 ms, which a turn waits at each of its steps in the loop. Turns of ten steps beside a thread that
parses all the time took 28 ms at the default and 14 ms at this value, 7 ms without the thread (medians).
"""
