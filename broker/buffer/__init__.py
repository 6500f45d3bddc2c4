"""What a run holds, for people: `slimebus buffer` reads the store beside a working broker, and asks the broker to change it.

reader.py  groups, prompts and samples of a store, read-only        export.py  to jsonl and safetensors files
verify.py  every record, every index                                 imports.py from those files
backup.py  a copy while the broker works, and back                   cli.py     the commands
"""
