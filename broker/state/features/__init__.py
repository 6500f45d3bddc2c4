"""What a run may do without; the core calls these and is whole without them.

consumers.py   others that read groups and add fields   evaluation.py      held-out scores of a version
pushes.py      prompts pushed while it goes on          edits.py           groups changed, taken in and revived by hand
settings.py    what may change while it goes on         partials.py        samples that a leaving worker had begun
"""
