"""What the broker shows of its state; it reads the state and decides nothing.

status.py   the whole picture   waits.py   who waits for whom   watchdog.py   has it stalled, and who is waited for
"""
