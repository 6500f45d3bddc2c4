"""What a run holds, for people: `slimebus buffer` reads the store beside a working broker, and asks the broker to change it.

reader.py  groups, prompts and samples of a store, read-only        export.py  to and from a folder of jsonl and safetensors files
verify.py  every record, every index                                 show.py    one group, for a person
changes.py edits through the run's broker                            cli.py     the commands
"""
