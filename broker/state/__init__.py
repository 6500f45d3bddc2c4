"""The broker's decisions: (event, now) -> effects. No socket, disk, clock or random source in here.

rules.py       the constants of a run                  effects.py   what goes in and what comes out
groups.py      the life of a group                     clients.py   who takes part; epochs and fencing
admission.py   when a worker may start a group         leases.py    lease, put, give back, expiry
batches.py     batch, fetch, commit                    timeline.py  resume and publish: lineages and versions
evaluation.py  held-out scores of a version            status.py    the whole picture, and who waits for whom
table.py       the state that the functions share      machine.py   the door: one event in, effects out
"""
