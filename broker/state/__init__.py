"""The broker's decisions: (events, now) -> effects. No socket, disk, clock or random source in here.

Prompts and the choice of a buffer filter are asked of two narrow protocols given as arguments (prompt_source.py, records.BufferFilter).

Each table of records has one owner, the file that writes it; other files call its functions (tests/broker/state/test_owners.py).

broker_state.py  the state that the functions share    records.py     what is stored    rules.py     the constants of a run
effects.py       what goes in and what comes out       groups.py      the groups in play, and what changes of one
clients.py       joining, epochs, fencing, settings    transitions.py what becomes of a group    lease_table.py  until when
heartbeats.py    which leases live on; commands        prompts.py     where the next prompt comes from; prompts that clients push
admission.py     when a worker may start a group       leases.py      lease, put, give back, expiry; unfinished groups
staleness.py     what is too old                       choice.py      the groups of a batch            batches.py   batch, fetch, commit
timeline.py      resume, publish                       ending.py      how a run ends                   evaluation.py  held-out scores
consumers.py     services that read the groups         settings.py    what may change meanwhile        edits.py     drop, replay, import
waiting.py       requests that wait for a reply       timers.py      deadlines                        damage.py    damaged records
watchdog.py      whether the run stands still          diagnosis.py   what each process waits for       status.py    the status
"""
