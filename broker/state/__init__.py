"""The broker's decisions: (events, now) -> effects. No socket, disk, clock or random source in here.

broker_state.py  the state that the functions share   wait_reasons.py what each process waits for
rules.py       the constants of a run                  records.py       what is stored of it
effects.py     what goes in and what comes out         transitions.py  what becomes of a group
groups.py      the groups in play, found in many ways  clients.py       who takes part; epochs and fencing
admission.py   when a worker may start a group         leases.py        lease, put, give back, expiry
staleness.py   what is too old                         choice.py        the groups of a batch
batches.py     batch, fetch, commit                    timeline.py      resume, publish, finish
prompts.py     where the next prompt comes from        waiting.py       requests that wait for their answer
timers.py      deadlines                               pace.py          how fast the run was so far
agreement.py   settings that all must have             damage.py        stored records that cannot be read
features/      what a run may do without
"""
