"""What a run holds, for people: `slimebus buffer` reads the store beside a working broker, and asks the broker to change it.

reader.py  groups, prompts and samples of a store, read-only        export.py  to a folder of jsonl and safetensors files
verify.py  every record, every index                                 imports.py from such a folder, or a file of prompts
changes.py edits through the run's broker                            cli.py     the commands
"""
