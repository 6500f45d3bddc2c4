"""The broker's decisions: (events, now) -> effects. No socket, disk, clock or random source in here.

machine.py     the door: a burst in, effects out       table.py      the state that the functions share
rules.py       the constants of a run                  effects.py    what goes in and what comes out
groups.py      the life of a group                     clients.py    who takes part; epochs and fencing
admission.py   when a worker may start a group         leases.py     lease, put, give back, expiry
staleness.py   what is too old                         choice.py     the groups of a batch
batches.py     batch, fetch, commit                    timeline.py   resume, publish, finish
prompts.py     where the next prompt comes from        timers.py     deadlines
damage.py      stored records that cannot be read
features/      what a run may do without
"""
