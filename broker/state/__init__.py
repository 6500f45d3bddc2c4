"""The broker's decisions: (events, now) -> effects. No socket, disk, clock or random source in here.

machine.py     the door: a burst in, effects out       table.py      the state that the functions share
rules.py       the constants of a run                  effects.py    what goes in and what comes out
groups.py      the life of a group                     clients.py    who takes part; epochs and fencing
admission.py   when a worker may start a group         leases.py     lease, put, give back, expiry
staleness.py   what is too old, what is chosen         batches.py    batch, fetch, commit
timeline.py    resume, publish, finish                 evaluation.py held-out scores of a version
timers.py      deadlines                               status.py     the whole picture, and who waits for whom
damage.py      stored records that cannot be read      edits.py       groups changed, taken in and revived by hand
archive.py     steps freed long ago                    prompts.py     where the next prompt comes from
pushes.py      prompts pushed while it goes on         partials.py    samples that a leaving worker had begun
settings.py    what may change while it goes on        choice.py      the groups of a batch
consumers.py   others that read groups and add fields  hedging.py     second leases of slow groups
watchdog.py    has it stalled, and who is waited for   demand.py      how many more workers would be busy
"""
