"""A run that is not run: the real state machine with workers and trainer as timed models on a virtual clock.

Workload (given, or calibrated from a run) --> SimulatedRun --> Outcome
"""
