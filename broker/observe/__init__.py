"""What the broker shows of its state; it reads the state and decides nothing.

status.py   the whole picture   watchdog.py   has it stalled, and who is waited for
"""
