"""What a step minimises: the chosen algorithm and corrections (plug-ins, one file each), what they are given, and what they share."""
